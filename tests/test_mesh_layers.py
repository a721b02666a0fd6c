"""Every parallel layout against one device and against the oracle, on 8 simulated devices."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layers import checkpoint_tensors, random_tokens
from mesh_layers import (
    CONFIG,
    LAYOUTS,
    arrays,
    assert_equal_stages,
    distributions,
    on_one_device,
    over_mesh,
    some_tokens,
    trace,
)
from numerics import assert_same_bits, relative_l2

from k3jax import GatedMLP
from k3jax.compare.tolerances import limits
from k3jax.experts import RECIPES
from k3jax.reference import oracle_trace
from sharding import make_mesh

# Where weights are plain, and where a token has one scale, nothing differs but what these three do. `-m slow` runs the
# others too.
OTHERS = ("replicated-ep2-tp4", "gather-dp2-ep2-tp2-split", "per-rank-dp2-ep4-bf16")
MATRIX = [
    pytest.param(name, recipe, marks=() if recipe in ("w4a16", "w4a8") or name in OTHERS else pytest.mark.slow)
    for recipe in RECIPES
    for name in LAYOUTS
]


@pytest.mark.parametrize(("name", "recipe"), MATRIX)
def test_sharded_equals_unsharded(name: str, recipe: str) -> None:
    """Faults 10, 14, 18 and 19: uniform, hot, skewed and no picks, on token counts that ranks cannot share evenly."""
    case = LAYOUTS[name]
    stages = {}
    for distribution, (weights, mask) in distributions(arrays(recipe)).items():
        stages[distribution] = trace(over_mesh(case, recipe, weights), some_tokens(), mask)
        assert_equal_stages(stages[distribution], on_one_device(recipe)[distribution], case.limit)
    uniform = stages["uniform"]
    tensors, x = checkpoint_tensors(arrays(recipe)), np.asarray(some_tokens())
    truth = oracle_trace(CONFIG, tensors, x, recipe=recipe, ids=np.asarray(uniform["expert_ids"]))
    allowed = 6e-3 if case.options.wire == "bf16" else limits("oracle", recipe).relative_l2
    assert relative_l2(uniform["output"], truth["output"]) < allowed


@pytest.mark.parametrize("name", ["replicated-ep8", "per-rank-ep8", "gather-dp2-ep2-tp2-split"])
def test_repeated_permuted_and_masked(name: str) -> None:
    """Bitwise the same when repeated, when experts change places with their router rows, and beside masked tokens."""
    case, weights = LAYOUTS[name], arrays("w4a8")
    layer, x = over_mesh(case, "w4a8", weights), some_tokens()
    mask = np.arange(len(x)) % 3 > 0
    first = trace(layer, x, mask)
    for _ in range(3):
        for stage, value in trace(layer, x, mask).items():
            assert_same_bits(value, first[stage])
    poisoned = trace(layer, jnp.where(jnp.asarray(mask)[:, None], x, jnp.nan), mask)
    assert_same_bits(poisoned["output"][mask], first["output"][mask])

    order: Any = np.random.default_rng(2).permutation(CONFIG.num_experts or 0)
    names = ("router_weight", "router_bias", "w13", "w2")
    permuted = dataclasses.replace(weights, **{name: getattr(weights, name)[order] for name in names})
    second = trace(over_mesh(case, "w4a8", permuted), x, mask)
    assert relative_l2(second["output"], first["output"]) < max(case.limit, 1e-6)
    picks = np.asarray(second["expert_ids"])
    np.testing.assert_array_equal(np.where(picks < 0, -1, order[picks]), first["expert_ids"])


@pytest.mark.parametrize(
    ("width", "sizes", "tokens"),
    [
        (256, (2, 2, 2), "replicated"),
        (516, (1, 8, 1), "replicated"),
        (515, (1, 4, 2), "replicated"),
        (515, (2, 2, 2), "sharded"),
    ],
)
def test_dense_layers(width: int, sizes: tuple[int, int, int], tokens: str) -> None:
    """Split over 4 ranks, over 4 of 8, and not at all."""
    dense = GatedMLP.random(64, width, activation=CONFIG.activation, rngs=nnx.Rngs(0))
    spread = GatedMLP(
        dense.gate_up[...], dense.down[...], activation=CONFIG.activation, mesh=make_mesh(*sizes), tokens=tokens
    )
    x = random_tokens((5, 3, 64), dtype="float32")
    ours, theirs = (jax.jit(lambda layer, x: layer(x))(layer, x) for layer in (spread, dense))
    assert relative_l2(ours, theirs) < 1e-3
