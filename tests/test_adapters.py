"""Low-rank adapters beside frozen experts: their product, their gradients, merging, and files of their own."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from format_truth import decode_mxfp4
from layers import SMALL, random_arrays, random_layer, random_tokens
from numerics import as_float64, assert_same_bits, relative_l2
from test_layer_gradient import plain_weights

from k3jax import MoE, save_layer
from k3jax.healing.pruning import cut_experts
from k3jax.healing.reference import moe_output
from k3jax.healing.step import split
from k3jax.merging import add_adapters, merge_adapters
from k3jax.saving import load_adapters, save_adapters
from pallas_kernels import MXFP4Array, low_rank_matmul
from sharding import make_mesh

pytestmark = pytest.mark.usefixtures("quickly_compiled")
NAMES = ("a13", "b13", "a2", "b2")


def adapted(recipe: str, *, shared: bool = False, trained: bool = True, seed: int = 0, **options: Any) -> MoE:
    """A layer with adapters of rank 4; `trained`: whose second matrices are not zero, but for expert 3's."""
    layer = MoE(SMALL, recipe=recipe, arrays=random_arrays(SMALL, recipe), **options)
    add_adapters(layer, rank=4, scale=0.5, shared=shared, rngs=nnx.Rngs(seed))
    assert layer.adapters is not None
    for number, variable in enumerate((layer.adapters.b13, layer.adapters.b2)):
        values = 0.3 * jax.random.normal(jax.random.key(number), variable.shape).astype(jnp.bfloat16)
        if trained:
            variable.set_value(jax.device_put(values if shared else values.at[3].set(0), variable[...].sharding))
    return layer


run = nnx.jit(lambda layer, x: layer(x))
routed = nnx.jit(lambda layer, x: layer.routed(x, layer.route(x)))


def test_the_product_and_its_gradients_are_those_of_the_formula() -> None:
    rng = np.random.default_rng(0)
    sizes = np.array([7, 0, 300, 4])
    used, rows = int(sizes.sum()), 320
    x, a, b = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((rows, 64), (4, 5, 64), (4, 24, 5)))
    dy = jnp.asarray(rng.standard_normal((rows, 24)), jnp.bfloat16).astype(jnp.float32)
    group = np.repeat(np.arange(4), sizes)

    def formula(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        y = jnp.einsum("mnr,mr->mn", b[group], jnp.einsum("mrk,mk->mr", a[group], x[:used]))
        return jnp.sum(y * dy[:used])

    @jax.jit
    def ours(x: jax.Array, a: jax.Array, b: jax.Array, dy: jax.Array) -> Any:
        y, pullback = jax.vjp(lambda x, a, b: low_rank_matmul(x, a, b, jnp.asarray(sizes)), x, a, b)
        return y, pullback(dy)

    past = jnp.arange(rows)[:, None] >= used
    y, (dx, *found) = ours(jnp.where(past, jnp.nan, x), a, b, jnp.where(past, jnp.nan, dy))
    wide = [operand.astype(jnp.float32) for operand in (x, a, b)]
    expected = jax.jit(jax.grad(formula, argnums=(0, 1, 2)))(*wide)
    assert y.dtype == jnp.float32
    assert not np.any(dx[used:])
    for gradient, truth in zip((dx, *found), expected, strict=True):
        assert gradient.dtype == jnp.bfloat16
        assert relative_l2(gradient, truth) < 1e-2
    assert not np.any(found[0][1])


def test_adapters_change_nothing_until_they_are_trained() -> None:
    x = random_tokens((24, 128))
    assert_same_bits(routed(adapted("w4a8_fp8", trained=False), x), routed(random_layer(SMALL, "w4a8_fp8"), x))


def test_adapters_that_experts_share_are_the_same_for_each() -> None:
    layer = adapted("w4a16", shared=True)
    assert layer.adapters is not None
    shared = layer.adapters.arrays()
    each = jax.tree.map(lambda matrices: jnp.broadcast_to(matrices, (16, *matrices.shape[1:])), shared)
    rows, sizes = random_tokens((24, 64)), jnp.array([5, 0, 9] + [0] * 13, jnp.int32)
    first, second = (jax.jit(lambda a: a.of_rows(rows, sizes))(arrays)[:14] for arrays in (shared, each))
    assert relative_l2(first, second) < 1e-3
    assert np.any(np.asarray(first))


def test_outputs_and_gradients_are_those_of_the_formula() -> None:
    layer = adapted("w4a16")
    x = random_tokens((24, 128), 4).astype(jnp.float32)
    out = jnp.asarray(np.random.default_rng(4).standard_normal(x.shape), jnp.float32)
    weights = {name: jnp.asarray(w) for name, w in plain_weights(random_arrays(SMALL, "w4a16"), np.float32).items()}
    ids = layer.route(x).ids
    assert layer.adapters is not None
    own = layer.adapters.arrays()

    def formula(adapters: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        a13, b13, a2, b2 = (adapters[name] for name in NAMES)
        w13 = weights["w13"] + own.scale * jnp.einsum("epfr,erl->epfl", b13, a13)
        w2 = weights["w2"] + own.scale * jnp.einsum("elr,erf->elf", b2, a2)
        return moe_output(weights | {"w13": w13, "w2": w2}, x, SMALL, ids)

    wide = {name: getattr(own, name).astype(jnp.float32) for name in NAMES}
    pullback: Any
    y, pullback = jax.vjp(jax.jit(formula), wide, x)
    assert relative_l2(run(layer, x), y) < 1e-2
    state, dx = nnx.jit(lambda layer, x: nnx.grad(lambda layer, x: jnp.sum(layer(x) * out), argnums=(0, 1))(layer, x))(
        layer, x
    )
    expected, expected_dx = pullback(out)
    assert relative_l2(dx, expected_dx) < 1e-2
    for name in NAMES:
        assert relative_l2(state["adapters"][name][...], expected[name]) < 1.5e-2, name
    _, params, _ = split(layer)
    assert {f"adapters/{name}" for name in NAMES} < set(params)


def test_merging_rounds_to_four_bits_and_says_what_that_lost() -> None:
    layer, before = adapted("w4a16"), random_layer(SMALL, "w4a16")
    assert layer.adapters is not None
    own, x = layer.adapters.arrays(), random_tokens((24, 128))
    y = routed(layer, x)
    error = merge_adapters(layer)
    assert layer.adapters is None
    merged, old = layer.w2.get_value(), before.w2.get_value()
    assert isinstance(merged, MXFP4Array)
    assert isinstance(old, MXFP4Array)
    for e in range(16):
        wanted = decode_mxfp4(np.asarray(old.codes[e]), np.asarray(old.scales[e]))
        wanted = wanted + 0.5 * as_float64(own.b2[e]) @ as_float64(own.a2[e])
        kept = decode_mxfp4(np.asarray(merged.codes[e]), np.asarray(merged.scales[e]))
        assert error.w2[e] == pytest.approx(relative_l2(kept, wanted), rel=1e-3, abs=1e-7)
    assert_same_bits(merged.codes[3], old.codes[3])
    assert error.w13[3] == error.w2[3] == 0
    assert 0.02 < np.delete(error.w13, 3).min() < error.w13.max() < 0.2
    assert "on average" in str(error)
    lost, added = relative_l2(routed(layer, x), y), relative_l2(routed(before, x), y)
    assert lost < added / 2, (lost, added)


def test_adapters_keep_in_a_file_of_their_own(tmp_path: Path) -> None:
    layer = adapted("w4a16", shared=True)
    path = save_adapters(layer, tmp_path / "adapters.safetensors")
    other = random_layer(SMALL, "w4a16")
    load_adapters(other, path)
    for ours, theirs in zip(jax.tree.leaves(other), jax.tree.leaves(layer), strict=True):
        assert_same_bits(ours, theirs)
    assert [file.name for file in tmp_path.iterdir()] == ["adapters.safetensors"]
    with pytest.raises(ValueError, match="layer 1 has adapters: merge_adapters first"):
        save_layer(layer, tmp_path / "out", index=1, source=SMALL)
    with pytest.raises(ValueError, match="has adapters already"):
        load_adapters(other, path)
    with pytest.raises(NotImplementedError, match="cutting experts that have adapters"):
        cut_experts(other, np.arange(8))
    fewer = cut_experts(random_layer(SMALL, "w4a16"), np.arange(8))
    own = save_adapters(adapted("w4a16"), tmp_path / "own.safetensors")
    with pytest.raises(ValueError, match=r"a13 is BF16 \(16, 4, 64\); the layer takes BF16 \(8, 4, 64\)"):
        load_adapters(fewer, own)


def test_adapters_over_a_mesh_are_those_of_one_device() -> None:
    """Each part of a hidden row goes through its part of `a2`, and is rounded there: hence not closer."""
    x = random_tokens((24, 128))
    split_layer = adapted("w4a16", mesh=make_mesh(data=1, expert=2, tensor=3))
    assert relative_l2(run(split_layer, x), run(adapted("w4a16"), x)) < 6e-3
