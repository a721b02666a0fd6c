"""MXFP8 and E4M3 with a scale a token: all values, all boundaries, and the rows on which other encoders made NaN."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotations import unchecked_annotations
from format_truth import (
    BF16,
    E4M3,
    decode_mxfp8,
    encode_fp8_token,
    encode_mxfp8,
    every_value,
    powers_of_two,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numerics import assert_same_bits

from pallas_kernels import MXFP8Array, TokenScaledArray, quantize_fp8_token, quantize_mxfp8

quantize = jax.jit(quantize_mxfp8)
quantize_token = jax.jit(quantize_fp8_token)
dequantize: Any = jax.jit(lambda q, dtype: q.dequantize(dtype), static_argnums=1)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
HELD = st.floats(-(2.0**127), 2.0**127, width=32)  # larger ones may round up to 2^128, beyond float32


def assert_encodes_like_the_truth(x: np.ndarray, q: MXFP8Array) -> None:
    values, scales = encode_mxfp8(x)
    assert_same_bits(q.scales, scales)
    assert_same_bits(q.values, values)


def half_a_step(magnitude: np.ndarray) -> np.ndarray:
    """Half of E4M3's step at a magnitude of at most 448; it stops shrinking below 2^-6."""
    return np.exp2(np.floor(np.log2(np.maximum(magnitude, 2.0**-6))) - 3) / 2


# ---- decoding


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_every_value_under_every_scale_byte(dtype: type[np.generic], compiled: bool) -> None:
    values = np.tile(np.arange(256, dtype=np.uint8).view(E4M3), (256, 1))
    scales = np.tile(np.arange(256, dtype=np.uint8)[:, None], (1, 8))
    q = MXFP8Array(jnp.asarray(values), jnp.asarray(scales))
    exact = decode_mxfp8(values, scales)
    with np.errstate(over="ignore"):  # infinite where the type ends
        expected = exact.astype(dtype)
    decode = dequantize if compiled else MXFP8Array.dequantize
    decoded = np.asarray(decode(q, dtype))
    held = expected.astype(np.float64) == exact
    if dtype == np.float32:
        assert (held | np.isnan(exact) | np.isinf(expected)).all()  # the format never rounds
        assert_same_bits(decoded, expected)
    else:  # bfloat16 ends at 2^-133
        assert_same_bits(np.where(held, decoded, 0), np.where(held, expected, 0))
        assert (held | np.isnan(exact) | np.isinf(expected) | (np.abs(exact) < 2.0**-126)).all()


# ---- encoding in blocks


@pytest.mark.parametrize("neighbour", [-1, 0, 1])
def test_every_exact_boundary_of_the_exponent_and_its_neighbours(neighbour: int) -> None:
    k = np.arange(-127, 120)
    amax = np.ldexp(448.0, k).astype(np.float32)
    if neighbour:
        amax = np.nextafter(amax, np.float32(neighbour * np.inf))
    x = np.random.default_rng(2).uniform(-1, 1, (k.size, 32)).astype(np.float32) * amax[:, None]
    x[np.arange(k.size), k % 32] = amax * np.where(k % 2, -1, 1)
    for encode in (quantize_mxfp8, quantize):
        q = encode(jnp.asarray(x))
        assert_encodes_like_the_truth(x, q)
        assert_same_bits(q.scales[:, 0], (k + 127 + (neighbour > 0)).astype(np.uint8))


@pytest.mark.parametrize("amax", [1.9, 3.8, 7.9, 500, 2.7, 5.5, 1.2, 448.1])
def test_fault_3_no_block_saturates(amax: float) -> None:
    x = np.float32(amax) * np.linspace(-1, 1, 32, dtype=np.float32)[None]
    q = quantize(jnp.asarray(x))
    scale = powers_of_two()[np.asarray(q.scales)]
    assert (np.abs(x) <= 448 * scale).all()
    assert (np.abs(x).max() > 448 * scale / 2).all()  # and no exponent is wasted
    error = np.abs(decode_mxfp8(np.asarray(q.values), np.asarray(q.scales)) - x)
    assert (error <= half_a_step(np.abs(x) / scale) * scale).all()
    floored = 2.0 ** (np.floor(np.log2(amax)) - 8)  # what an encoder by the letter of the OCP document takes
    assert (amax > 448 * floored) == (amax not in (2.7, 5.5, 1.2))


def test_nearest_value_and_ties_to_even_as_ml_dtypes_rounds() -> None:
    values = every_value(E4M3, 8)
    midpoints = (values[1:] + values[:-1]) / 2
    points = np.concatenate([values, midpoints, *(np.nextafter(midpoints, np.float32(to)) for to in (-np.inf, np.inf))])
    x = np.tile(points[:, None], (1, 32))
    x[:, 0] = 448.0  # pins the scale to 1
    for encode in (quantize_mxfp8, quantize):
        q = encode(jnp.asarray(x))
        assert_encodes_like_the_truth(x, q)
        assert_same_bits(q.values[:, 1], points.astype(E4M3))


@pytest.mark.parametrize("dtype", [np.float16, BF16])
def test_all_finite_numbers_of_the_short_types(dtype: type[np.generic]) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    bits = bits[np.isfinite(bits)]
    in_order = bits[: bits.size // 32 * 32].reshape(-1, 32)
    mixed = np.random.default_rng(3).permutation(in_order.ravel()).reshape(-1, 32)
    x = np.concatenate([in_order, mixed])
    assert_encodes_like_the_truth(x.astype(np.float32), quantize(jnp.asarray(x)))


def test_random_values_of_every_magnitude_and_any_leading_shape() -> None:
    rng = np.random.default_rng(4)
    scale = np.ldexp(1.0, rng.integers(-149, 126, (16, 8, 1)))
    x = np.clip(rng.standard_normal((16, 8, 96)) * scale, -(2.0**127), 2.0**127).astype(np.float32)
    for rows in (x, x[0], x[0, 0], x[:0]):
        q = quantize(jnp.asarray(rows))
        assert q.shape == rows.shape
        assert q.ndim == rows.ndim
        assert_encodes_like_the_truth(rows, q)


def nearly_zero_rows() -> np.ndarray:
    rows = np.zeros((6, 64), np.float32)
    rows[1, 5] = 6e-38
    rows[2] = np.linspace(-(2.0**-130), 2.0**-130, 64)
    rows[3, ::2] = 2.0**-149
    rows[4] = -0.0
    rows[5] = 2.0**-126
    return rows


def test_fault_4_nearly_zero_rows_stay_finite_in_blocks_and_keep_their_values() -> None:
    x = nearly_zero_rows()
    q = quantize(jnp.asarray(x))
    assert_encodes_like_the_truth(x, q)
    decoded = np.asarray(dequantize(q, jnp.float32))
    assert np.isfinite(decoded).all()
    assert decoded[1, 5] == pytest.approx(6e-38, rel=2**-4)
    np.testing.assert_array_equal(decoded[5], x[5])
    assert_same_bits(decoded[4], x[4])


def test_fault_4_nearly_zero_rows_stay_finite_with_a_scale_a_token() -> None:
    x = nearly_zero_rows()
    for encode in (quantize_fp8_token, quantize_token):
        q = encode(jnp.asarray(x))
        values, scales = encode_fp8_token(x)
        assert_same_bits(q.values, values)
        assert_same_bits(q.scales, scales)
        decoded = np.asarray(q.values).astype(np.float64) * np.asarray(q.scales)
        assert np.isfinite(decoded).all()
        assert not decoded[[0, 3, 4]].any()
        assert decoded[1, 5] == pytest.approx(6e-38, rel=2**-4)
        np.testing.assert_array_equal(decoded[5], 2.0**-126)
        assert np.isfinite(np.asarray(dequantize(q, jnp.float32))).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_no_number_poisons_its_block_or_its_token_only(poison: float) -> None:
    x = np.ones((2, 96), np.float32)
    x[0, 40] = poison
    expected = x.copy()
    expected[0, 32:64] = np.nan
    assert_same_bits(dequantize(quantize(jnp.asarray(x)), jnp.float32), expected)
    token = np.asarray(dequantize(quantize_token(jnp.asarray(x)), jnp.float32))
    assert np.isnan(token[0]).all()
    np.testing.assert_allclose(token[1], 1, rtol=1e-6)


@settings(max_examples=40)
@given(hnp.arrays(np.float32, (2, 64), elements=HELD))
def test_the_error_is_at_most_half_a_step_and_encoding_again_changes_nothing(x: np.ndarray) -> None:
    q = quantize(jnp.asarray(x))
    decoded = decode_mxfp8(np.asarray(q.values), np.asarray(q.scales))
    scale = np.repeat(powers_of_two()[np.asarray(q.scales)], 32, axis=-1)
    magnitude = np.abs(x.astype(np.float64)) / scale
    assert (magnitude <= 448).all()
    assert (np.abs(x - decoded) <= half_a_step(magnitude) * scale).all()
    once = dequantize(q, jnp.float32)
    assert_same_bits(dequantize(quantize(once), jnp.float32), once)


@settings(max_examples=40)
@given(hnp.arrays(np.float32, (1, 32), elements=st.floats(2.0**-20, 2.0**20, width=32)), st.integers(-80, 80))
def test_scaling_by_a_power_of_two_moves_only_the_scale(x: np.ndarray, exponent: int) -> None:
    rows, scaled_rows = jnp.asarray(x), jnp.asarray(np.ldexp(x, exponent))
    block, scaled_block = quantize(rows), quantize(scaled_rows)
    assert_same_bits(scaled_block.values, block.values)
    assert_same_bits(scaled_block.scales, (np.asarray(block.scales).astype(int) + exponent).astype(np.uint8))
    token, scaled_token = quantize_token(rows), quantize_token(scaled_rows)
    assert_same_bits(scaled_token.values, token.values)
    assert_same_bits(scaled_token.scales, np.ldexp(np.asarray(token.scales), exponent))


# ---- encoding with a scale a token


@pytest.mark.parametrize("neighbour", [-1, 0, 1])
def test_a_token_s_scale_at_every_exact_boundary_and_its_neighbours(neighbour: int) -> None:
    k = np.arange(-127, 120)
    amax = np.ldexp(448.0, k).astype(np.float32)
    if neighbour:
        amax = np.nextafter(amax, np.float32(neighbour * np.inf))
    x = np.random.default_rng(8).uniform(-1, 1, (k.size, 40)).astype(np.float32) * amax[:, None]
    x[np.arange(k.size), k % 40] = amax * np.where(k % 2, -1, 1)
    for encode in (quantize_fp8_token, quantize_token):
        q = encode(jnp.asarray(x))
        values, _ = encode_fp8_token(x)
        assert_same_bits(q.values, values)
        assert_same_bits(q.scales[:, 0], np.ldexp(np.float32(1), np.maximum(k + (neighbour > 0), -126)))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_tokens_encode_like_the_truth_from_every_dtype(dtype: type[np.generic]) -> None:
    rng = np.random.default_rng(6)
    exponents = rng.integers(-24, 15, (4, 64, 1)) if dtype == np.float16 else rng.integers(-149, 125, (4, 64, 1))
    x = (rng.uniform(-1, 1, (4, 64, 40)) * np.ldexp(1.0, exponents)).astype(dtype)
    for rows in (x, x[0], x[0, 0], x[:0]):
        q = quantize_token(jnp.asarray(rows))
        values, scales = encode_fp8_token(rows)
        assert_same_bits(q.values, values)
        assert_same_bits(q.scales, scales)


@settings(max_examples=40)
@given(hnp.arrays(np.float32, (2, 40), elements=FINITE))
def test_a_token_s_errors_are_half_steps_and_nothing_saturates(x: np.ndarray) -> None:
    q = quantize_token(jnp.asarray(x))
    scale = np.asarray(q.scales).astype(np.float64)
    magnitude = np.abs(x.astype(np.float64)) / scale
    assert (magnitude <= 448).all()
    largest = magnitude.max(axis=-1, keepdims=True)
    assert ((largest > 224) | (scale == 2.0**-126)).all()  # no exponent is wasted
    error = np.abs(np.asarray(q.values).astype(np.float64) * scale - x)
    assert (error <= half_a_step(magnitude) * scale).all()


def test_a_token_without_elements_has_the_smallest_scale() -> None:
    q = quantize_token(jnp.zeros((3, 0)))
    assert q.shape == (3, 0)
    np.testing.assert_array_equal(np.asarray(q.scales), np.full((3, 1), 2.0**-126, np.float32))


# ---- the pytrees, and inputs in any layout


@pytest.mark.parametrize("encode", [quantize_mxfp8, quantize_fp8_token])
def test_leaves_go_through_jit_vmap_scan_and_maps_to_none(encode: Callable[[jax.Array], Any]) -> None:
    q = jax.jit(encode)(jnp.asarray(np.random.default_rng(7).standard_normal((3, 4, 64)).astype(np.float32)))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(q)]
    assert paths == [".values", ".scales"]
    nothing = jax.tree.map(lambda _: None, q)
    assert type(nothing) is type(q)
    assert nothing.values is None
    plain = np.asarray(dequantize(q, jnp.float32))
    assert_same_bits(dequantize(jax.jit(lambda q: q)(q), jnp.float32), plain)
    assert_same_bits(jax.jit(jax.vmap(lambda q: q.dequantize(jnp.float32)))(q), plain)
    assert_same_bits(jax.lax.scan(lambda n, q: (n, q.dequantize(jnp.float32)), 0, q)[1], plain)


@pytest.mark.parametrize("encode", [quantize_mxfp8, quantize_fp8_token])
def test_fault_20_slices_transposed_views_and_donated_rows(encode: Callable[[jax.Array], Any]) -> None:
    big = np.random.default_rng(5).standard_normal((96, 80)).astype(np.float32)
    view = big[:64, 10:42].T
    truth = encode_mxfp8 if encode is quantize_mxfp8 else encode_fp8_token
    expected = truth(np.ascontiguousarray(view))
    traced = jax.jit(lambda x: encode(x[:64, 10:42].T))(jnp.asarray(big))
    rows = jnp.asarray(view)
    donated = jax.jit(lambda x: (encode(x), x + 1), donate_argnums=0)(rows)[0]
    assert rows.is_deleted()
    for q in (encode(jnp.asarray(view)), traced, donated):
        assert_same_bits(q.values, expected[0])
        assert_same_bits(q.scales, expected[1])


# ---- errors


def e4m3(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.float8_e4m3fn)


@pytest.mark.parametrize(
    ("make", "values", "scales", "message"),
    [
        (MXFP8Array, jnp.zeros((4, 32)), jnp.zeros((4, 1), jnp.uint8), "must be float8_e4m3fn and uint8"),
        (MXFP8Array, e4m3(4, 32), jnp.zeros((4, 1)), "values float8_e4m3fn and scales float32 must be"),
        (MXFP8Array, e4m3(4, 40), jnp.zeros((4, 1), jnp.uint8), r"values \(4, 40\) must end in a multiple of 32"),
        (MXFP8Array, e4m3(4, 64), jnp.zeros((4, 1), jnp.uint8), r"need scales \(4, 2\), not \(4, 1\)"),
        (TokenScaledArray, e4m3(4, 40), jnp.zeros((4, 1), jnp.uint8), "must be float8_e4m3fn and float32"),
        (TokenScaledArray, e4m3(4, 40), jnp.zeros(4), r"TokenScaledArray: values \(4, 40\) need scales \(4, 1\)"),
    ],
)
def test_arrays_that_break_the_contract_raise(make: Any, values: jax.Array, scales: jax.Array, message: str) -> None:
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        make(values, scales)


def test_what_cannot_be_encoded_raises() -> None:
    with pytest.raises(ValueError, match=r"quantize_mxfp8: shape \(2, 48\) must end in a multiple of 32"):
        quantize_mxfp8(jnp.zeros((2, 48)))
    with pytest.raises(NotImplementedError, match=r"'mosaic': it is written for .*; pass xla or reference"):
        quantize_mxfp8(jnp.zeros((2, 32)), implementation="mosaic")
    with pytest.raises(ValueError, match="implementation='cuda' is not one of reference, xla, triton, mosaic"):
        quantize_fp8_token(jnp.zeros((2, 32)), implementation="cuda")
    with unchecked_annotations():
        with pytest.raises(ValueError, match="takes a floating-point array, not int32"):
            quantize_mxfp8(jnp.zeros((2, 32), jnp.int32))
        with pytest.raises(ValueError, match=r"floating-point array \[..., K\], not int32"):
            quantize_fp8_token(jnp.zeros((2, 32), jnp.int32))
        with pytest.raises(ValueError, match=r"not float32\[\]"):
            quantize_fp8_token(jnp.float32(1))


def test_parts_of_tokens_with_the_whole_tokens_amax_are_parts_of_the_whole() -> None:
    """Ranks that hold parts of a row agree on its largest magnitude first; a NaN in one part is seen in all."""
    x = jax.random.normal(jax.random.key(11), (5, 64)) * jnp.geomspace(1e-3, 9, 64)[None, :]
    x = x.astype(jnp.bfloat16).at[3, 60].set(jnp.nan)
    whole = quantize_token(x)
    amax = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    for part in (slice(0, 32), slice(32, 64)):
        ours = quantize_token(x[:, part], amax=amax)
        assert_same_bits(ours.scales, whole.scales)
        assert_same_bits(ours.values[:3], whole.values[:3, part])
    assert not np.array_equal(quantize_token(x[:, :32]).scales, whole.scales)
