"""Every tuning that is committed, at the sizes that it was found for, against XLA's product: all rows of a call."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.bench.calls import KIMI, make_experts, make_rows, quantized_rows
from k3jax.bench.cases import Case
from k3jax.bench.results import ERROR_LIMITS
from pallas_kernels import grouped_matmul
from pallas_kernels.grouped_matmul import tuned
from pallas_kernels.grouped_matmul.kernel_layout import RECIPES, to_kernel_layout

pytestmark = pytest.mark.gpu
WINNERS: list[dict[str, Any]] = json.loads(tuned.WINNERS.read_text(encoding="utf-8"))


@jax.jit
def row_errors(found: jax.Array, expected: jax.Array) -> jax.Array:
    """Of each row the relative L2."""
    difference, length = (jnp.linalg.norm(rows.astype(jnp.float32), axis=1) for rows in (found - expected, expected))
    return difference / length


@pytest.mark.parametrize("recipe", ["w4a16", "w4a8_fp8"])
@pytest.mark.parametrize("op", ["w13", "w2"])
def test_every_tuning_gives_xla_s_rows(op: str, recipe: str) -> None:
    experts = make_experts(Case(op, recipe, 1))
    w = to_kernel_layout(experts, recipe=recipe, gated=op == "w13")
    activation = KIMI if op == "w13" else None
    for record in WINNERS:
        if (record["op"], record["mma"]) != (op, RECIPES[recipe]):
            continue
        for distribution in ("uniform", "zipf", "hot"):
            case = Case(op, recipe, record["rows"], record["groups"], distribution)
            assert tuned.choose(case.rows, w.shape[0], *w.shape[1:], w.mma, w.gated).source.startswith("measured")
            x, sizes = quantized_rows(case, make_rows(case)), jnp.asarray(case.group_sizes)
            found = grouped_matmul(x, w, sizes, activation=activation, implementation="mosaic")
            expected = grouped_matmul(x, experts, sizes, activation=activation, implementation="xla")
            worst = float(np.max(row_errors(found, expected)))
            print(op, recipe, case.rows, distribution, "worst row off by", worst)
            assert worst < 4 * ERROR_LIMITS[recipe], (record["rows"], distribution)
