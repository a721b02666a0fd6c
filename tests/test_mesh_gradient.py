"""Gradients over a mesh are those of one device: of x, and of every weight that is not packed."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from mesh_layers import CONFIG, LAYOUTS, Case, arrays, over_mesh, some_tokens
from numerics import relative_l2

from k3jax import GatedMLP, LoadOptions, MoE
from sharding import make_mesh

WEIGHTS = ["latent_down", "latent_norm", "latent_up", "router/bias", "router/weight", "shared/down", "shared/gate_up"]
CHUNKED = Case((2, 2, 2), "sharded", LoadOptions(transport="per_rank", split_shared=True, max_tokens=8))


@functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})
def gradients(layer: nnx.Module, x: jax.Array) -> Any:
    def loss(layer: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(layer(x) ** 2)

    return nnx.grad(loss, argnums=(0, 1))(layer, x)


def named(found: Any) -> dict[str, jax.Array]:
    weights, dx = found
    return {"/".join(map(str, path)): value[...] for path, value in nnx.to_flat_state(weights)} | {"x": dx}


@pytest.mark.parametrize(
    ("recipe", "case"),
    [
        ("bf16", LAYOUTS["replicated-ep2-tp4"]),
        ("w4a8", LAYOUTS["gather-dp2-ep2-tp2-split"]),
        ("w4a8", CHUNKED),
    ],
    ids=("replicated", "gathered", "per rank, in chunks"),
)
def test_sharded_equals_unsharded(recipe: str, case: Case) -> None:
    """The gradient of the sum of squares, which also has the outputs' own differences in it."""
    x = some_tokens().astype(jnp.float32)
    weights = arrays(recipe)
    theirs = named(gradients(MoE(CONFIG, recipe=recipe, arrays=weights), x))
    ours = named(gradients(over_mesh(case, recipe, weights), x))
    assert sorted(ours) == sorted(theirs) == sorted([*WEIGHTS, "x"])
    for name, gradient in ours.items():
        assert bool(jnp.any(gradient != 0)) == (name != "router/bias"), name
        assert relative_l2(gradient, theirs[name]) < 1e-2, name  # bfloat16 cotangents, added up in another order


def test_a_dense_layer() -> None:
    dense = GatedMLP.random(64, 128, activation=CONFIG.activation, rngs=nnx.Rngs(0))
    spread = GatedMLP(
        dense.gate_up[...],
        dense.down[...],
        activation=CONFIG.activation,
        mesh=make_mesh(2, 2, 2),
        tokens="sharded",
        options=LoadOptions(split_shared=True),
    )
    x = some_tokens().astype(jnp.float32)
    theirs, ours = (named(gradients(layer, x)) for layer in (dense, spread))
    for name in ("gate_up", "down", "x"):
        assert relative_l2(ours[name], theirs[name]) < 1e-2, name
