"""What routes tokens and moves rows, compiled for one H200 that is not there: how many kernels, and none of a host."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from annotations import unchecked_annotations
from compiled_triton import Gpus, lower
from hlo import Program

from k3jax import K3Config
from k3jax.routing import Router, pick_experts
from pallas_kernels import RowSchedule, combine_rows, gather_rows, schedule_rows

CONFIG = K3Config.from_pretrained(Path(__file__).parents[1] / "data" / "k3-config.json")
EXPERTS, PICKS, LATENT = 896, 16, 3584
NOT_RUN = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element"}


def shape_of(*shape: int, dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def pick(logits: jax.Array, bias: jax.Array) -> Any:
    return pick_experts(logits, bias, CONFIG)


def places(tokens: int) -> Any:
    return shape_of(tokens, PICKS, dtype=jnp.int32)


def order(tokens: int) -> RowSchedule:
    return RowSchedule(shape_of(tokens * PICKS, dtype=jnp.int32), places(tokens), shape_of(112, dtype=jnp.int32))


def numbers(*shape: int, dtype: Any = jnp.float32) -> Any:
    return shape_of(*shape, dtype=dtype)


# By name: the program, its operands for a number of tokens, and its fusions at 8 and at 1024.
PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]], int]] = {
    "pick": (pick, lambda t: (numbers(t, EXPERTS), numbers(EXPERTS)), 4),
    "schedule": (lambda ids: schedule_rows(ids, 112), lambda t: (places(t),), 6),
    "gather": (
        gather_rows,
        lambda t: (numbers(t, LATENT, dtype=jnp.bfloat16), order(t)),
        1,
    ),
    "combine": (
        combine_rows,
        lambda t: (numbers(t * PICKS, LATENT, dtype=jnp.bfloat16), places(t), numbers(t, PICKS)),
        1,
    ),
}


@pytest.mark.parametrize("tokens", [8, 1024])
@pytest.mark.parametrize("name", PROGRAMS)
def test_few_kernels_and_no_host(name: str, tokens: int, gpus: Gpus) -> None:
    function, operands, fusions = PROGRAMS[name]
    program = Program(lower(function, operands(tokens), gpus, 90).compile().as_text())
    run = [program.instructions[each].op for each in program.entry]
    assert [op for op in run if op not in NOT_RUN] == ["fusion"] * fusions
    assert not program.custom_calls


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=str)
def test_logits_are_sums_in_float32(dtype: Any, gpus: Gpus) -> None:
    def logits(x: jax.Array, weight: jax.Array) -> jax.Array:
        return Router(weight, jnp.zeros(EXPERTS)).logits(x)

    operands = numbers(64, 7168, dtype=dtype), numbers(EXPERTS, 7168, dtype=jnp.bfloat16)
    with unchecked_annotations():
        text = lower(logits, operands, gpus, 90).compile().as_text()
    assert "f32[64,896]" in text
    assert "bf16[64,896]" not in text
    assert ("HIGHEST" in text or "operand_precision={highest,highest}" in text) or dtype == jnp.bfloat16
    assert "tf32" not in text.lower()
