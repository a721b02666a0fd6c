"""A decode step of the whole layer on one H200 that is not there: how many kernels, and which waits for which."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from annotations import unchecked_annotations
from hlo import Program
from jax.sharding import Mesh

from k3jax import K3Config, MoE
from k3jax.moe_arrays import MoEArrays

CONFIG = K3Config.from_pretrained(Path(__file__).parents[1] / "data" / "k3-config.json")


@pytest.mark.parametrize(("recipe", "kernels"), [("w4a16", 13), ("w4a8_fp8", 14)])
def test_the_shared_experts_start_behind_what_the_routed_ones_wait_for(
    recipe: str, kernels: int, hopper: Mesh, choose_for: Callable[[Mesh], None]
) -> None:
    choose_for(hopper)
    with unchecked_annotations(), jax.set_mesh(hopper):
        layer = MoE(CONFIG, recipe=recipe, implementation="mosaic", arrays=MoEArrays.abstract(CONFIG, packed=True))
        x = jax.ShapeDtypeStruct((8, CONFIG.hidden_size), jnp.bfloat16)
        program = Program(jax.jit(MoE.__call__).trace(layer, x).lower(lowering_platforms=("cuda",)).compile().as_text())
    ops = [program.instructions[name].op for name in program.entry]
    assert ops.count("custom-call") + ops.count("fusion") == kernels
    (latent,) = program.readers(program.parameter("latent_down.value"))
    (gate_up,) = program.readers(program.parameter("shared.gate_up.value"))
    (w13,) = program.readers(program.parameter("w13.value.words"))
    assert latent in program.needs(gate_up)
    assert latent in program.needs(w13)
    assert gate_up not in program.needs(w13)
    assert w13 not in program.needs(gate_up)
