"""The oracle's number formats, against ml_dtypes' independent tables and the inputs that other encoders got wrong."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.reference import formats

BF16 = ml_dtypes.bfloat16
Rounding = Callable[[np.ndarray], np.ndarray]


def every_float(dtype: type[np.generic], bits: int) -> np.ndarray:
    """Every finite value of a narrow type, in order, as ml_dtypes decodes it."""
    codes = np.arange(2**bits, dtype=np.uint16 if bits == 16 else np.uint8)
    with np.errstate(invalid="ignore"):  # bfloat16's signalling NaNs
        values = codes.view(dtype).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


@pytest.mark.parametrize(
    ("rounding", "dtype", "bits"),
    [
        (formats.round_bf16, ml_dtypes.bfloat16, 16),
        (formats.round_e4m3, ml_dtypes.float8_e4m3fn, 8),
        (formats.round_e2m1, ml_dtypes.float4_e2m1fn, 4),
    ],
)
def test_rounding_agrees_with_ml_dtypes_at_and_around_every_value_and_every_midpoint(
    rounding: Rounding, dtype: type[np.generic], bits: int
) -> None:
    values = every_float(dtype, bits)
    np.testing.assert_array_equal(rounding(values), values)
    midpoints = ((values[1:] + values[:-1]) / 2).astype(np.float32)  # exact, and ml_dtypes rounds a float32 only once
    for points in (midpoints, *(np.nextafter(midpoints, np.float32(way)) for way in (-np.inf, np.inf))):
        np.testing.assert_array_equal(rounding(points.astype(np.float64)), points.astype(dtype).astype(np.float64))


@pytest.mark.parametrize(
    ("rounding", "tie"),
    [
        (formats.round_bf16, 1 + 2.0**-8),
        (formats.round_e4m3, 1 + 2.0**-4),
        (formats.round_e2m1, 1.25),
        (formats.round_f32, 1 + 2.0**-24),
    ],
)
def test_a_hair_beside_a_tie_is_no_tie(rounding: Rounding, tie: float) -> None:
    above = rounding(np.array([np.nextafter(tie, 2.0)]))  # a cast by way of float32 would see a tie and take 1
    assert rounding(np.array([tie])) == 1
    assert above > 1


def test_overflow_saturates_or_not_as_the_format_does() -> None:
    largest_bf16 = float(ml_dtypes.finfo(BF16).max)
    beyond = np.array([largest_bf16, 2.0**128 - 2.0**119, -(2.0**129), np.nan])
    np.testing.assert_array_equal(formats.round_bf16(beyond), [largest_bf16, np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(formats.round_e4m3(np.array([449, 1e9, -465, np.nan])), [448, 448, -448, np.nan])
    np.testing.assert_array_equal(formats.round_e2m1(np.array([6.5, -1e9, 5.0, 0.25])), [6, -6, 4, 0])


@given(st.floats(allow_nan=False, allow_infinity=False, width=64))
def test_round_f32_agrees_with_the_cast(x: float) -> None:
    with np.errstate(over="ignore", under="ignore"):
        assert formats.round_f32(np.array([x])) == np.float32(x).astype(np.float64)


def test_scale_bytes_are_powers_of_two_from_end_to_end() -> None:
    scales = formats.e8m0_values(np.array([0, 127, 134, 254, 255], dtype=np.uint8))
    np.testing.assert_array_equal(scales, [2.0**-127, 1, 128, 2.0**127, np.nan])
    every = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(formats.e8m0_values(every), every.view(ml_dtypes.float8_e8m0fnu).astype(np.float64))


def test_mxfp4_decodes_every_code_under_every_scale() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)  # every byte, and so every pair of codes
    low, high = codes & 15, codes >> 4
    table = np.stack([low, high], axis=-1).reshape(16, 32).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    for byte in range(256):
        scale = np.full((16, 1), byte, dtype=np.uint8)
        expected = table * (2.0 ** (byte - 127) if byte < 255 else np.nan)
        np.testing.assert_array_equal(formats.decode_mxfp4(codes, scale), expected)


def test_decoding_refuses_scales_that_do_not_match() -> None:
    with pytest.raises(ValueError, match=r"uint8 codes \[N, K/2\]"):
        formats.decode_mxfp4(np.zeros((4, 32), np.uint8), np.zeros((4, 1), np.uint8))


@pytest.mark.parametrize("largest", [6.0, 448.0])
def test_the_block_exponent_is_the_smallest_that_does_not_saturate(largest: float) -> None:
    boundaries = np.array([largest * 2.0**e for e in range(-118, 119)])
    amax = np.concatenate([boundaries, np.nextafter(boundaries, 0), np.nextafter(boundaries, np.inf)])
    exponent = formats.scale_exponents(amax, largest)
    assert np.all(amax <= np.ldexp(largest, exponent))
    assert np.all(amax > np.ldexp(largest, exponent - 1))


@pytest.mark.parametrize("amax", [1.9, 3.8, 7.9, 500, 2.7, 5.5, 1.2, 448.1])
@pytest.mark.parametrize(
    "through", [formats.through_mxfp4, formats.through_mxfp8, formats.through_fp8_token], ids=lambda f: f.__name__
)
def test_the_largest_of_a_block_survives_within_half_a_step(through: Rounding, amax: float) -> None:
    block = np.linspace(-amax, amax / 3, 32)
    half_step = 2.0**-2 if through is formats.through_mxfp4 else 2.0**-4
    assert abs(through(block)[0] + amax) <= half_step * amax


@pytest.mark.parametrize("through", [formats.through_mxfp8, formats.through_fp8_token], ids=lambda f: f.__name__)
def test_rows_of_nearly_nothing_stay_finite(through: Rounding) -> None:
    rows = np.zeros((4, 64))
    rows[1, 5] = 6e-38
    rows[2] = np.arange(64) * 2.0**-149  # float32's subnormals
    rows[3, 7] = 2.0**-126
    result = through(rows)
    assert np.all(np.isfinite(result))
    assert not np.any(result[0])
    np.testing.assert_allclose(result[3, 7], 2.0**-126, rtol=2**-4)


def test_one_scale_a_token_is_the_smallest_power_of_two_that_does_not_saturate() -> None:
    rows = np.random.default_rng(0).standard_normal((400, 256)).astype(BF16).astype(np.float64)
    scale = 2.0 ** np.ceil(np.log2(np.abs(rows).max(axis=1, keepdims=True) / 448))
    expected = (rows / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    np.testing.assert_array_equal(formats.through_fp8_token(rows), expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_value_takes_its_whole_block_or_row_and_nothing_else(bad: float) -> None:
    rows = np.ones((2, 64))
    rows[0, 40] = bad
    for through in (formats.through_mxfp4, formats.through_mxfp8):
        np.testing.assert_array_equal(np.isnan(through(rows)), [[False] * 32 + [True] * 32, [False] * 64])
    np.testing.assert_array_equal(np.isnan(formats.through_fp8_token(rows)), [[True] * 64, [False] * 64])


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=32, max_size=32))
def test_a_quantised_block_is_its_own_quantisation(block: list[float]) -> None:
    for through in (formats.through_mxfp4, formats.through_mxfp8):
        once = through(np.array(block))
        np.testing.assert_array_equal(through(once), once)


def test_blocks_are_never_cut() -> None:
    with pytest.raises(ValueError, match="last axis of 48"):
        formats.through_mxfp8(np.zeros((2, 48)))
