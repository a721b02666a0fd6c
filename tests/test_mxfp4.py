"""MXFP4: every code under every scale byte, every boundary of the encoder, and what MXFP4Array promises as a pytree."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotations import unchecked_annotations
from format_truth import BF16, E2M1, decode_mxfp4, encode_mxfp4, every_value, powers_of_two, unpack_codes
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numerics import assert_same_bits

from pallas_kernels import MXFP4Array, quantize_mxfp4

quantize = jax.jit(quantize_mxfp4)
dequantize: Any = jax.jit(MXFP4Array.dequantize, static_argnums=1)
HELD = st.floats(-(2.0**127), 2.0**127, width=32)  # larger ones may round up to 2^128, beyond float32


def assert_encodes_like_the_truth(x: np.ndarray, w: MXFP4Array) -> None:
    codes, scales = encode_mxfp4(x)
    assert_same_bits(w.scales, scales)
    assert_same_bits(unpack_codes(np.asarray(w.codes)), codes)


def random_array(*shape: int, seed: int = 0) -> MXFP4Array:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), np.uint8)
    scales = rng.integers(100, 140, (*shape[:-1], shape[-1] // 32), np.uint8)
    return MXFP4Array(jnp.asarray(codes), jnp.asarray(scales))


# ---- decoding


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_every_code_under_every_scale_byte_is_exact(dtype: type[np.generic], compiled: bool) -> None:
    codes = np.tile(np.arange(16, dtype=np.uint8) * 17, (256, 1))  # each byte holds one code twice
    scales = np.arange(256, dtype=np.uint8)[:, None]
    w = MXFP4Array(jnp.asarray(codes), jnp.asarray(scales))
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    with np.errstate(over="ignore"):  # infinite where the type ends
        expected = (np.repeat(table, 2) * powers_of_two()[:, None]).astype(dtype)
    decode = dequantize if compiled else MXFP4Array.dequantize
    values = np.asarray(decode(w, dtype))
    assert_same_bits(values, expected)
    assert np.isnan(values[255].astype(np.float32)).all()
    assert np.isinf(values[254].astype(np.float32)).sum() == 16  # 2, 3, 4 and 6 times 2^127, twice, in both signs


def test_fault_1_and_2_the_ends_of_the_scales_by_hand() -> None:
    scales = jnp.array([[0], [127], [134], [254], [255]], jnp.uint8)
    ones = MXFP4Array(jnp.full((5, 16), 0x22, jnp.uint8), scales)
    values = np.asarray(dequantize(ones, jnp.float32))[:, 0].astype(np.float64)
    np.testing.assert_array_equal(values, [2.0**-127, 1.0, 128.0, 2.0**127, np.nan])


def test_the_low_nibble_is_the_even_element_and_scales_run_along_k() -> None:
    codes = np.zeros((1, 32), np.uint8)
    codes[0, 0], codes[0, 16] = 0x52, 0xA1  # 1 and 3; then, in the second block, 0.5 and -1
    w = MXFP4Array(jnp.asarray(codes), jnp.array([[127, 130]], jnp.uint8))
    values = np.asarray(dequantize(w, jnp.float32))
    assert w.shape == (1, 64)
    assert values[0, [0, 1, 32, 33]].tolist() == [1.0, 3.0, 4.0, -8.0]
    np.testing.assert_array_equal(values, decode_mxfp4(codes, np.array([[127, 130]])))


def test_float16_is_rounded_from_the_exact_value() -> None:
    w = random_array(8, 64)
    with np.errstate(over="ignore"):
        expected = decode_mxfp4(np.asarray(w.codes), np.asarray(w.scales)).astype(np.float16)
    assert_same_bits(dequantize(w, jnp.float16), expected)


# ---- encoding


@pytest.mark.parametrize("neighbour", [-1, 0, 1])
def test_every_exact_boundary_of_the_exponent_and_its_neighbours(neighbour: int) -> None:
    k = np.arange(-127, 126)
    amax = np.ldexp(6.0, k).astype(np.float32)
    if neighbour:
        amax = np.nextafter(amax, np.float32(neighbour * np.inf))
    x = np.random.default_rng(2).uniform(-1, 1, (k.size, 32)).astype(np.float32) * amax[:, None]
    x[np.arange(k.size), k % 32] = amax * np.where(k % 2, -1, 1)
    w = quantize(jnp.asarray(x))
    assert_encodes_like_the_truth(x, w)
    assert_same_bits(w.scales[:, 0], (k + 127 + (neighbour > 0)).astype(np.uint8))


def test_nearest_value_and_ties_to_even_as_ml_dtypes_rounds() -> None:
    values = every_value(E2M1, 4)
    midpoints = (values[1:] + values[:-1]) / 2
    points = np.concatenate([values, midpoints, *(np.nextafter(midpoints, np.float32(to)) for to in (-np.inf, np.inf))])
    x = np.zeros((points.size, 2, 32), np.float32)
    x[:, :, 0] = 6.0  # pins the scale to 1
    x[:, 1, 1:] = points[:, None]
    w = quantize(jnp.asarray(x))
    assert_encodes_like_the_truth(x, w)
    assert_same_bits(dequantize(w, jnp.float32)[:, 1, 1], points.astype(E2M1).astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float16, BF16])
def test_all_finite_numbers_of_the_short_types(dtype: type[np.generic]) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    bits = bits[np.isfinite(bits)]
    in_order = bits[: bits.size // 32 * 32].reshape(-1, 32)
    mixed = np.random.default_rng(3).permutation(in_order.ravel()).reshape(-1, 32)
    x = np.concatenate([in_order, mixed])
    w = quantize(jnp.asarray(x))
    assert_encodes_like_the_truth(x.astype(np.float32), w)


def test_random_values_of_every_magnitude_encode_like_the_truth_eagerly_and_compiled() -> None:
    rng = np.random.default_rng(4)
    scale = np.ldexp(1.0, rng.integers(-149, 127, (512, 1)))
    x = (rng.standard_normal((512, 96)) * scale).astype(np.float32)
    x = np.where(np.isfinite(x), x, np.float32(1))
    for encode in (quantize_mxfp4, quantize):
        assert_encodes_like_the_truth(x, encode(jnp.asarray(x)))


def test_zero_blocks_subnormals_and_signed_zeros() -> None:
    x = np.zeros((4, 64), np.float32)
    x[1, :32] = -0.0
    x[2, 3] = 2.0**-149  # below the smallest code's half: nothing is left of it, and nothing is NaN
    x[3, :3] = [2.0**-126, -(2.0**-127), 2.0**-128]  # exact under scale byte 0
    w = quantize(jnp.asarray(x))
    assert not np.asarray(w.scales).any()
    expected = x.copy()
    expected[2] = 0
    assert_same_bits(dequantize(w, jnp.float32), expected)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_block_with_a_value_that_is_no_number_reads_as_nan_and_no_other_does(poison: float) -> None:
    x = np.ones((2, 96), np.float32)
    x[0, 40] = poison
    w = quantize(jnp.asarray(x))
    expected = x.copy()
    expected[0, 32:64] = np.nan
    assert_same_bits(dequantize(w, jnp.float32), expected)
    assert np.asarray(w.scales).tolist() == [[125, 255, 125], [125, 125, 125]]


@settings(max_examples=40)
@given(hnp.arrays(np.float32, (2, 64), elements=HELD))
def test_the_error_is_at_most_half_a_step_and_encoding_again_changes_nothing(x: np.ndarray) -> None:
    w = quantize(jnp.asarray(x))
    decoded = decode_mxfp4(np.asarray(w.codes), np.asarray(w.scales))
    scale = np.repeat(powers_of_two()[np.asarray(w.scales)], 32, axis=-1)
    magnitude = np.abs(x.astype(np.float64)) / scale
    assert (magnitude <= 6).all()
    step = np.select([magnitude < 2, magnitude < 4], [0.5, 1.0], 2.0) * scale
    assert (np.abs(x - decoded) <= step / 2).all()
    once = dequantize(w, jnp.float32)
    assert_same_bits(dequantize(quantize(once), jnp.float32), once)


@settings(max_examples=40)
@given(
    hnp.arrays(np.float32, (1, 32), elements=st.floats(2.0**-20, 2.0**20, width=32)),
    st.integers(-80, 80),
)
def test_scaling_by_a_power_of_two_moves_only_the_scale_byte(x: np.ndarray, exponent: int) -> None:
    w, scaled = quantize(jnp.asarray(x)), quantize(jnp.asarray(np.ldexp(x, exponent)))
    assert_same_bits(scaled.codes, w.codes)
    assert_same_bits(scaled.scales, (np.asarray(w.scales).astype(int) + exponent).astype(np.uint8))


# ---- the pytree


def test_leaves_paths_and_structure_survive_a_round_trip() -> None:
    w = random_array(3, 4, 64)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(w)]
    assert paths == [".codes", ".scales"]
    rebuilt = jax.tree.unflatten(jax.tree.structure(w), jax.tree.leaves(w))
    assert isinstance(rebuilt, MXFP4Array)
    assert rebuilt.codes is w.codes
    assert rebuilt.shape == (3, 4, 64)
    assert rebuilt.ndim == 3


def test_maps_to_none_to_shapes_and_to_other_things_without_complaint() -> None:
    w = random_array(3, 4, 64)
    nothing = jax.tree.map(lambda _: None, w)
    assert (nothing.codes, nothing.scales) == (None, None)
    assert jax.tree.leaves(nothing) == []
    both = jax.tree.map(lambda a, b: b, w, jax.tree.map(str, w))
    assert both.codes == str(w.codes)
    shapes = jax.eval_shape(lambda x: quantize_mxfp4(x), jax.ShapeDtypeStruct((3, 4, 64), jnp.float32))
    assert (shapes.codes.shape, shapes.scales.shape, shapes.shape) == ((3, 4, 32), (3, 4, 2), (3, 4, 64))


def test_passes_through_jit_vmap_scan_and_indexing_unchanged() -> None:
    w = random_array(3, 4, 64)
    plain = np.asarray(dequantize(w, jnp.float32))
    through = jax.jit(lambda w: w)(w)
    assert_same_bits(through.codes, w.codes)

    def decode(w: MXFP4Array, factor: jax.Array) -> jax.Array:
        return w.dequantize(jnp.float32) * factor

    two = jnp.float32(2)
    assert_same_bits(jax.jit(jax.vmap(decode, in_axes=(0, None)))(w, two), 2 * plain)
    axes = jax.tree.unflatten(jax.tree.structure(w), (0, 0))
    assert_same_bits(jax.jit(jax.vmap(decode, in_axes=(axes, None)))(w, two), 2 * plain)
    assert_same_bits(jax.jit(jax.vmap(decode, in_axes=(None, 0)))(w, jnp.ones(2))[1], plain)

    def add(total: jax.Array, w: MXFP4Array) -> tuple[jax.Array, jax.Array]:
        assert w.shape == (4, 64)
        return total + 1, w.dequantize(jnp.float32)

    count, scanned = jax.lax.scan(add, jnp.int32(0), w)
    assert count == 3
    assert_same_bits(scanned, plain)
    assert_same_bits(dequantize(w[1], jnp.float32), plain[1])
    assert_same_bits(dequantize(w[1:], jnp.float32), plain[1:])
    assert_same_bits(dequantize(w[jnp.array([2, 0])], jnp.float32), plain[[2, 0]])


def test_fault_20_slices_and_transposed_views_encode_as_copies_do() -> None:
    big = np.random.default_rng(5).standard_normal((96, 80)).astype(np.float32)
    view = big[:64, 10:42].T  # [32, 64], contiguous in no direction of its own
    expected = encode_mxfp4(np.ascontiguousarray(view))
    traced = jax.jit(lambda x: quantize_mxfp4(x[:64, 10:42].T))(jnp.asarray(big))
    donated = jax.jit(lambda x: (quantize_mxfp4(x), x + 1), donate_argnums=0)(jnp.asarray(view))[0]
    for w in (quantize(jnp.asarray(view)), traced, donated):
        assert_same_bits(unpack_codes(np.asarray(w.codes)), expected[0])
        assert_same_bits(w.scales, expected[1])


# ---- errors


def u8(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.uint8)


@pytest.mark.parametrize(
    ("codes", "scales", "message"),
    [
        (jnp.zeros((4, 16), jnp.int8), u8(4, 1), "codes must be uint8, not int8"),
        (u8(4, 16), jnp.zeros((4, 1), jnp.float32), "scales must be uint8, not float32"),
        (u8(16), u8(1), r"codes has shape \(16,\); at least \[N, K\]"),
        (u8(4, 16), u8(4, 2), r"codes \(4, 16\) and scales \(4, 2\) do not belong together"),
        (u8(4, 16), u8(5, 1), r"codes \(4, 16\) and scales \(5, 1\)"),
        (u8(4, 24), u8(4, 1), r"codes \(4, 24\) and scales \(4, 1\)"),
    ],
)
def test_arrays_that_break_the_contract_raise(codes: Any, scales: Any, message: str) -> None:
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        MXFP4Array(codes, scales)


def test_what_cannot_be_encoded_or_decoded_raises() -> None:
    with pytest.raises(ValueError, match=r"quantize_mxfp4: shape \(2, 48\) must end in a multiple of 32"):
        quantize_mxfp4(jnp.zeros((2, 48)))
    with pytest.raises(ValueError, match="int32 is not a floating-point type"):
        random_array(2, 32).dequantize(jnp.int32)
    with unchecked_annotations():
        with pytest.raises(ValueError, match="takes a floating-point array, not int32"):
            quantize_mxfp4(jnp.zeros((2, 32), jnp.int32))
        with pytest.raises(ValueError, match=r"shape \(32,\) must be \[..., N, K\]"):
            quantize_mxfp4(jnp.zeros(32))
        with pytest.raises(ValueError, match="multiple of 32"):
            quantize_mxfp4(jnp.float32(1))
