"""Layers over a mesh whose ranks all have the same tokens, against the same layers on one device."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from layers import random_arrays, random_tokens, small_config
from numerics import relative_l2

from k3jax import GatedMLP, MoE
from sharding import make_mesh

CONFIG = small_config(moe_intermediate_size=128)
trace: Any = jax.jit(lambda layer, x, mask=None: layer.trace(x, mask))


@pytest.mark.parametrize(("sizes", "limit"), [((1, 8, 1), 0.0), ((2, 2, 2), 4e-3)])
def test_sharded_equals_unsharded(sizes: tuple[int, int, int], limit: float) -> None:
    """Exactly, but where F is split: then rows are rounded once, after the sum over ranks and experts."""
    arrays = random_arrays(CONFIG, "w4a8")
    x = random_tokens((37, 128))
    ours, theirs = (
        trace(MoE(CONFIG, recipe="w4a8", arrays=arrays, mesh=mesh), x) for mesh in (make_mesh(*sizes), None)
    )
    assert set(ours) == set(theirs)
    for stage, value in ours.items():
        assert value.shape == theirs[stage].shape
        assert relative_l2(value, theirs[stage]) <= limit, stage


@pytest.mark.parametrize(("width", "sizes"), [(256, (1, 4, 2)), (516, (1, 4, 2)), (515, (2, 2, 2)), (516, (1, 8, 1))])
def test_dense_layers(width: int, sizes: tuple[int, int, int]) -> None:
    dense = GatedMLP.random(128, width, activation=CONFIG.activation, rngs=nnx.Rngs(0))
    spread = GatedMLP(dense.gate_up[...], dense.down[...], activation=CONFIG.activation, mesh=make_mesh(*sizes))
    x = random_tokens((5, 3, 128), dtype="float32")
    np.testing.assert_allclose(trace(spread, x)["output"], trace(dense, x)["output"], rtol=1e-2, atol=0)
    assert relative_l2(trace(spread, x)["output"], trace(dense, x)["output"]) < 1e-3
