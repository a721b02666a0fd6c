"""Layers over a mesh within the user's own programs, with automatic and explicit axes, and what cannot be laid out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotations import unchecked_annotations
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from layers import random_tokens
from mesh_layers import CONFIG, arrays
from numerics import assert_same_bits, relative_l2

from k3jax import GatedMLP, LoadOptions, MoE, expert_load
from sharding import AXES, make_mesh

SIZES = (2, 4, 1)


def mesh_of(kind: AxisType) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(SIZES), AXES, axis_types=(kind,) * 3)


@pytest.fixture(scope="module")
def one_device() -> MoE:
    return MoE(CONFIG, arrays=arrays("w4a16"))


call: Any = jax.jit(lambda layer, x: layer(x), compiler_options={"xla_backend_optimization_level": "0"})


def program(layers: list[Any], x: jax.Array, w: jax.Array) -> jax.Array:
    """Something larger: the user's own matmul, residuals, a layer that is used twice."""
    x = x @ w
    for layer in layers:
        x = x + layer(x)
    return x


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [(AxisType.Auto, "replicated"), (AxisType.Explicit, "replicated"), (AxisType.Explicit, "sharded")],
)
def test_within_a_larger_sharded_program(kind: AxisType, tokens: str, one_device: MoE) -> None:
    mesh = mesh_of(kind)
    layer = MoE(CONFIG, arrays=arrays("w4a16"), mesh=mesh, tokens=tokens)
    x = random_tokens((4, 6, 64), dtype="float32")
    w = random_tokens((64, 64), seed=3, dtype="float32") / 8
    theirs = jax.jit(program)([one_device, one_device], x, w)
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh):
        w = jax.device_put(w, NamedSharding(mesh, PartitionSpec()))
        ours = jax.jit(program)([layer, layer], placed, w)
    assert relative_l2(ours, theirs) < 5e-4
    assert ours.sharding.device_set == set(mesh.devices.flat)
    if kind == AxisType.Explicit:
        assert jax.typeof(ours).sharding.spec[0] == "data"


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (AxisType.Auto, (0, 64)),
        (AxisType.Auto, (64,)),
        (AxisType.Explicit, (3, 3, 64)),
    ],
)
def test_token_counts_that_do_not_fit(kind: AxisType, shape: tuple[int, ...], one_device: MoE) -> None:
    """Fault 10: no tokens, one token on 8 ranks, fewer than ranks, one more than they share. Called without jit."""
    layer = MoE(CONFIG, arrays=arrays("w4a16"), mesh=mesh_of(kind), tokens="sharded")
    x = random_tokens(shape, dtype="float32")
    y = layer(x)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert relative_l2(y, call(one_device, x)) < 5e-4
    if len(shape) == 3:
        with jax.set_mesh(layer.layout.mesh):
            routing = layer.route(x)
        assert int(expert_load(routing, 16, ranks=4).per_rank.sum()) == 9 * 2


def test_vmap(one_device: MoE) -> None:
    layer = MoE(CONFIG, arrays=arrays("w4a16"), mesh=make_mesh(*SIZES), tokens="sharded")
    x = random_tokens((3, 8, 64), dtype="float32")
    mapped: Any = jax.jit(jax.vmap(layer), compiler_options={"xla_backend_optimization_level": "0"})
    assert relative_l2(mapped(x), call(one_device, x)) < 5e-4


def test_equal_scores_go_to_the_lowest_ids_on_every_rank() -> None:
    """Fault 25."""
    x = jnp.zeros((16, 64), jnp.bfloat16)
    weights = arrays("w4a16")
    for tokens in ("replicated", "sharded"):
        layer = MoE(CONFIG, arrays=weights, mesh=make_mesh(*SIZES), tokens=tokens)
        layer.router.bias.set_value(layer.router.bias[...] * 0)
        assert_same_bits(layer.route(x).ids, jnp.tile(jnp.arange(2, dtype=jnp.int32)[None], (16, 1)))


def moe(**arguments: Any) -> MoE:
    return MoE(CONFIG, arrays=arrays("w4a16"), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": (1, 3, 1)}, "expert of size 16 cannot be split evenly over 3 devices"),
        ({"sizes": (1, 1, 8)}, r"leaves 16 a device.*multiples of 32"),
        ({"tokens": "both"}, "tokens='both' is not one of replicated, sharded"),
        ({"options": LoadOptions(wire="f16")}, "wire='f16' is not one of f32, bf16"),
        ({"options": LoadOptions(transport="per_rank")}, "transport='per_rank' is for tokens='sharded'"),
        ({"options": LoadOptions(transport="pigeon"), "tokens": "sharded"}, "transport='pigeon' is not one of"),
        ({"options": LoadOptions(split_shared=True)}, "split_shared=True is for tokens='sharded'"),
        ({"sizes": None, "tokens": "sharded"}, "needs a mesh"),
    ],
)
def test_what_cannot_be_laid_out(arguments: dict[str, Any], message: str) -> None:
    """Faults 9 and 16 among them: before any weight is touched."""
    sizes = arguments.pop("sizes", SIZES)
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        moe(mesh=None if sizes is None else make_mesh(*sizes), **arguments)


def test_meshes_of_other_axes_and_parts_of_explicit_ones() -> None:
    with pytest.raises(ValueError, match=r"axes x, not data, expert, tensor.*make_mesh"):
        moe(mesh=jax.make_mesh((8,), ("x",)))
    dense = GatedMLP.random(64, 516, activation=CONFIG.activation, rngs=nnx.Rngs(0))
    explicit = Mesh(np.array(jax.devices()).reshape(1, 8, 1), AXES, axis_types=(AxisType.Explicit,) * 3)
    with pytest.raises(NotImplementedError, match="split over 4 ranks, a part of an axis"):
        GatedMLP(dense.gate_up[...], dense.down[...], activation=CONFIG.activation, mesh=explicit)
    with pytest.raises(ValueError, match="max_tokens=0 must be positive"):
        LoadOptions(max_tokens=0)
