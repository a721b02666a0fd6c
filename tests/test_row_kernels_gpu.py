"""The activations and quantisers of a Hopper GPU: every bfloat16, every tail of a row, to the bit where bits are exact.

Run with `pytest -m gpu` where JAX sees one.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from format_truth import BF16, E4M3, decode_mxfp8, encode_fp8_token, encode_mxfp8
from gemm_truth import activate
from norm_truth import require_normed
from numerics import assert_same_bits, relative_l2

from pallas_kernels import (
    Activation,
    MXFP8Array,
    Situ,
    SwiGLU,
    quantize_fp8_token,
    quantize_mxfp8,
    rms_norm,
    situ_and_mul,
    swiglu_and_mul,
)
from pallas_kernels.row_kernels.mosaic_rows import dequantize_mxfp8

pytestmark = pytest.mark.gpu
KIMI = Situ(4.0, 25.0)
BLOCKS = jax.jit(lambda x: quantize_mxfp8(x, implementation="mosaic"))
TOKENS = jax.jit(lambda x: quantize_fp8_token(x, implementation="mosaic"))


def apply(activation: Activation, gate_up: jax.Array, implementation: str = "mosaic") -> jax.Array:
    if isinstance(activation, SwiGLU):
        return swiglu_and_mul(gate_up, implementation=implementation)
    beta, linear_beta = activation.beta, activation.linear_beta
    return situ_and_mul(gate_up, beta=beta, linear_beta=linear_beta, implementation=implementation)


def every_bfloat16() -> np.ndarray:
    """All bit patterns, in blocks of neighbours and in mixed ones; NaN and infinities too."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    return np.concatenate([bits, np.random.default_rng(0).permutation(bits)]).view(BF16).reshape(-1, 32)


def rows_of_all_magnitudes(*shape: int) -> np.ndarray:
    rng = np.random.default_rng(shape[-1])
    exponents = rng.integers(-133, 126, (*shape[:-1], 1))
    return (rng.uniform(-1, 1, shape) * np.ldexp(1.0, exponents)).astype(BF16)


def test_every_bfloat16_in_blocks() -> None:
    x = every_bfloat16()
    q = BLOCKS(jnp.asarray(x))
    values, scales = encode_mxfp8(x.astype(np.float32))
    assert_same_bits(q.scales, scales)
    assert_same_bits(q.values, values)
    poisoned = np.asarray(q.scales)[:, 0] == 255
    assert poisoned.any()
    assert not np.asarray(q.values).view(np.uint8)[poisoned].any()


@pytest.mark.parametrize("shape", [(1, 32), (1, 96), (3, 3584), (2, 5, 3072), (1000, 7168)], ids=str)
def test_blocks_of_every_shape(shape: tuple[int, ...]) -> None:
    x = rows_of_all_magnitudes(*shape)
    q = BLOCKS(jnp.asarray(x))
    values, scales = encode_mxfp8(x.astype(np.float32))
    assert_same_bits(q.scales, scales)
    assert_same_bits(q.values, values)


@pytest.mark.parametrize("shape", [(1, 8), (7, 40), (5, 3584), (2, 5, 3072), (9, 8192), (1001, 264)], ids=str)
def test_tokens_of_every_shape(shape: tuple[int, ...]) -> None:
    x = rows_of_all_magnitudes(*shape)
    x[0, ..., :] = 0
    q = TOKENS(jnp.asarray(x))
    values, scales = encode_fp8_token(x.astype(np.float32))
    assert_same_bits(q.scales, scales)
    assert_same_bits(q.values, values)


def test_every_bfloat16_in_tokens_and_poison_stays_in_its_own() -> None:
    x = every_bfloat16()
    q = TOKENS(jnp.asarray(x))
    finite = np.isfinite(x.astype(np.float32)).all(axis=1)
    assert 0 < finite.sum() < len(x)
    values, scales = encode_fp8_token(x[finite].astype(np.float32))
    assert_same_bits(np.asarray(q.scales)[finite], scales)
    assert_same_bits(np.asarray(q.values)[finite], values)
    assert np.isnan(np.asarray(q.scales)[~finite]).all()
    assert not np.asarray(q.values).view(np.uint8)[~finite].any()


def test_every_value_under_every_scale_decodes_to_the_same_bits() -> None:
    values = np.tile(np.arange(256, dtype=np.uint8).view(E4M3), (256, 1))
    scales = np.tile(np.arange(256, dtype=np.uint8)[:, None], (1, 8))
    decoded = np.asarray(jax.jit(dequantize_mxfp8)(MXFP8Array(jnp.asarray(values), jnp.asarray(scales))))
    with np.errstate(over="ignore", invalid="ignore"):
        expected = decode_mxfp8(values, scales).astype(np.float32).astype(BF16)
    assert_same_bits(decoded, expected)


@pytest.mark.parametrize("activation", [KIMI, Situ(1.0, None), Situ(0.5, 3.0), SwiGLU()], ids=str)
def test_activations_are_rounded_once_at_every_magnitude(activation: Activation) -> None:
    """Pairs of both signs from 1e-7 to 40, each element within half a step of bfloat16 and float32's rounding."""
    side = np.concatenate([np.logspace(-7, -1, 300), np.linspace(0.1, 40, 211)])
    axis = np.concatenate([-side, side]).astype(BF16)
    gate, up = np.meshgrid(axis, axis[::3], indexing="ij")
    width = gate.shape[1] // 8 * 8
    gate, up = gate[:, :width], up[:, :width]
    got = np.asarray(apply(activation, jnp.asarray(np.concatenate([gate, up], axis=1))))
    expected = activate(activation, gate, up)
    error = np.abs(got.astype(np.float64) / expected - 1)
    assert error.max() < 2.0**-8 + 1e-5
    assert relative_l2(got, expected) < 2e-3
    small = (np.abs(gate.astype(np.float64)) < 1e-3) & (np.abs(up.astype(np.float64)) < 1e-3)
    assert small.any()
    rounded = expected.astype(BF16)
    assert (got[small] == rounded[small]).mean() > 0.99


@pytest.mark.parametrize("shape", [(1, 16), (7, 80), (2, 5, 6144), (129, 1040)], ids=str)
def test_activations_of_every_shape_and_poison_stays_where_it_is(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(shape[-1])
    x = rng.standard_normal(shape).astype(BF16)
    x[..., -1, 3] = np.nan
    got = np.asarray(apply(KIMI, jnp.asarray(x))).astype(np.float32)
    gate, up = np.split(x.astype(np.float32), 2, axis=-1)
    expected = activate(KIMI, gate, up)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    finite = np.isfinite(expected)
    assert np.abs(got[finite] / expected[finite] - 1).max() < 2.0**-8 + 1e-5


def test_the_bounds_hold_at_the_ends() -> None:
    ends = np.array([3.3e38, -3.3e38, 0, np.inf, -np.inf, 1, -1, 100], BF16)
    gate, up = (part.reshape(1, -1) for part in np.meshgrid(ends, ends, indexing="ij"))
    value = np.asarray(apply(KIMI, jnp.asarray(np.concatenate([gate, up], axis=1)))).astype(np.float32)
    assert (np.abs(value) <= 100).all()
    assert value[0, 0] == 100
    assert value[0, 3 * 8 + 4] == -100


def test_gradients_and_tangents_are_the_formula_s() -> None:
    x = jnp.asarray(np.random.default_rng(1).standard_normal((4, 64)).astype(BF16))
    gradients = [
        jax.jit(jax.grad(lambda x, name=name: apply(KIMI, x, name).astype(jnp.float32).sum()))(x)
        for name in ("mosaic", "xla")
    ]
    assert_same_bits(*gradients)
    tangents = [jax.jvp(lambda x, name=name: apply(KIMI, x, name), (x,), (x,))[1] for name in ("mosaic", "xla")]
    assert_same_bits(*tangents)
    for quantize in (BLOCKS, TOKENS):  # as without a kernel: no gradient, rather than an error
        gradient = jax.grad(lambda x, quantize=quantize: quantize(x).dequantize(jnp.float32).sum())(x)
        assert not np.asarray(gradient).any()


@pytest.mark.parametrize("op", ["blocks", "tokens", "situ"])
def test_a_batch_is_more_rows(op: str) -> None:
    call: Any = {"blocks": BLOCKS, "tokens": TOKENS, "situ": lambda x: apply(KIMI, x)}[op]
    x = jnp.asarray(rows_of_all_magnitudes(3, 5, 64))
    batched, plain = jax.jit(jax.vmap(call, in_axes=1, out_axes=1))(x), call(x)
    jax.tree.map(assert_same_bits, batched, plain)
    sliced = jnp.asarray(rows_of_all_magnitudes(64, 96)).T[:, :32]
    jax.tree.map(assert_same_bits, jax.jit(call)(sliced), call(jnp.array(np.asarray(sliced))))


@pytest.mark.parametrize("kind", ["blocks", "tokens", "situ"])
def test_more_than_two_to_the_31_bytes(kind: str) -> None:
    """Offsets beyond 32 bits: the last rows are as right as the first."""
    rows, width = 400_000, 6144  # 4.9 GB
    few = jnp.asarray(rows_of_all_magnitudes(16, width))
    x = jnp.tile(few, (rows // 16, 1))
    call: Any = {"blocks": BLOCKS, "tokens": TOKENS, "situ": jax.jit(lambda x: apply(KIMI, x))}[kind]
    expected = jax.tree.map(np.asarray, call(few))
    got = call(x)
    jax.tree.map(lambda a, b: assert_same_bits(a[-16:], b), got, expected)
    jax.tree.map(lambda a, b: assert_same_bits(a[:16], b), got, expected)


@pytest.mark.parametrize("shape", [(1, 8), (7, 40), (8, 3584), (2, 5, 3072), (9, 4096), (1001, 264)], ids=str)
def test_norms_of_every_shape(shape: tuple[int, ...]) -> None:
    """And zeros, and a row of NaN, which stays in its own."""
    keys = jax.random.split(jax.random.key(shape[-1]), 3)
    scales = jnp.exp(jax.random.uniform(keys[1], (*shape[:-1], 1), minval=-9.0, maxval=9.0))
    x = (jax.random.normal(keys[0], shape) * scales).reshape(-1, shape[-1])
    x = x.at[1:2].set(0).at[2:3, 0].set(jnp.nan).reshape(shape)
    gain = jax.random.normal(keys[2], shape[-1:]).astype(jnp.bfloat16)
    require_normed(rms_norm(x, gain, eps=1e-5, implementation="mosaic"), x, gain, 1e-5)


def test_norms_have_the_formula_s_gradient_and_a_batch() -> None:
    x = jax.random.normal(jax.random.key(0), (3, 5, 64))
    gain = jnp.ones(64, jnp.bfloat16)

    def total(implementation: str) -> Any:
        def call(x: jax.Array, gain: jax.Array) -> jax.Array:
            normed = jax.vmap(lambda x: rms_norm(x, gain, eps=1e-5, implementation=implementation))(x)
            return jnp.vdot(jnp.arange(64.0), jnp.sum(normed.astype(jnp.float32), axis=(0, 1)))

        return jax.grad(call, argnums=(0, 1))

    mine, other = (total(name)(x, gain) for name in ("mosaic", "xla"))
    for a, b in zip(mine, other, strict=True):
        assert relative_l2(a.astype(jnp.float32), b.astype(jnp.float32)) < 1e-5
