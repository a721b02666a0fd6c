"""The oracle's own number formats, in NumPy float64.

Every function takes and returns float64 arrays that hold values of the format: `round_bf16(x)` is the bfloat16 nearest
to `x`, as a float64. Nothing here goes through a narrower type on the way (a cast from float64 to bfloat16 by way of
float32 rounds twice) and nothing is shared with the layer or its kernels, so an error in one cannot hide in the other.
"""

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Bytes = NDArray[np.uint8]

BLOCK = 32
"""Values that share one scale, along the last axis."""

SMALLEST_SCALE = -127
"""The exponent of E8M0 byte 0."""

E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The value of each 4-bit code."""

_BYTE_VALUES = np.stack([np.tile(E2M1_VALUES, 16), np.repeat(E2M1_VALUES, 16)], axis=-1)
"""[256, 2]: the two values of a packed byte, low nibble first."""


def round_to(x: Values, digits: int, smallest_exponent: int) -> Values:
    """The nearest number of `digits` significant binary digits, ties to even; no limit above.

    Below 2^smallest_exponent the spacing stops shrinking, as a format's subnormals do: with |x| = m 2^e, 1/2 <= m < 1,

        step = 2^max(e - digits, smallest_exponent + 1 - digits),    result = step * rint(x / step)

    x any shape, float64. Zeros keep their sign; infinities and NaN pass.
    """
    _, exponent = np.frexp(x)
    step = np.maximum(exponent - digits, smallest_exponent + 1 - digits)
    rounded: Values = np.ldexp(np.rint(np.ldexp(x, -step)), step)
    return rounded


def _overflow(x: Values, largest_exponent: int) -> Values:
    """Rounded values that reach 2^(largest_exponent + 1) as infinities, as IEEE formats have it."""
    return np.where(np.abs(x) >= 2.0 ** (largest_exponent + 1), np.copysign(np.inf, x), x)


def round_bf16(x: Values) -> Values:
    """bfloat16: 8 significant digits, subnormals below 2^-126, infinity beyond 2^128."""
    return _overflow(round_to(x, 8, -126), 127)


def round_f32(x: Values) -> Values:
    """float32: 24 significant digits, subnormals below 2^-126, infinity beyond 2^128."""
    return _overflow(round_to(x, 24, -126), 127)


def round_e4m3(x: Values) -> Values:
    """float8 e4m3: 4 significant digits, subnormals below 2^-6, saturating at 448; NaN passes."""
    return np.clip(round_to(x, 4, -6), -448, 448)


def round_e2m1(x: Values) -> Values:
    """4-bit e2m1: 2 significant digits, subnormals below 1, saturating at 6; NaN passes."""
    return np.clip(round_to(x, 2, 0), -6, 6)


def e8m0_values(scale_bytes: Bytes) -> Values:
    """2^(byte - 127) for uint8 scale bytes: byte 0 is 2^-127 (not zero) and byte 255 is NaN (not infinity)."""
    powers = np.ldexp(1.0, scale_bytes.astype(np.int32) + SMALLEST_SCALE)
    return np.where(scale_bytes == 255, np.nan, powers)


def decode_mxfp4(codes: Bytes, scale_bytes: Bytes) -> Values:
    """[N, K/2] uint8 pairs of codes (low nibble = even index) and [N, K/32] uint8 scale bytes -> [N, K] float64.

    value[n, k] = E2M1[code[n, k]] * 2^(scale_byte[n, k // 32] - 127)
    """
    rows, pairs = codes.shape
    if codes.dtype != np.uint8 or scale_bytes.dtype != np.uint8 or scale_bytes.shape != (rows, 2 * pairs // BLOCK):
        raise ValueError(
            f"MXFP4 wants uint8 codes [N, K/2] and uint8 scales [N, K/32]: got codes {codes.shape} {codes.dtype}, "
            f"scales {scale_bytes.shape} {scale_bytes.dtype}"
        )
    blocks = _BYTE_VALUES[codes].reshape(rows, -1, BLOCK)
    blocks *= e8m0_values(scale_bytes)[..., None]
    return blocks.reshape(rows, 2 * pairs)


def decode_nvfp4(codes: Bytes, scales: Values, global_scale: float) -> Values:
    """[N, K/2] uint8 pairs of codes and [N, K/16] float64 values of e4m3 scales -> [N, K] float64.

    value[n, k] = E2M1[code[n, k]] * scale[n, k // 16] * global_scale
    """
    rows, pairs = codes.shape
    blocks = _BYTE_VALUES[codes].reshape(rows, -1, 16) * scales[..., None]
    return (blocks * global_scale).reshape(rows, 2 * pairs)


def scale_exponents(amax: Values, largest: float) -> NDArray[np.int32]:
    """ceil(log2(amax / largest)), at least -127: the smallest power of two that brings a block's amax within `largest`.

    Exact, without a logarithm. With amax = m 2^e and largest = c 2^q, 1/2 <= m, c < 1, it is e - q, plus 1 where m > c.
    A block of zeros gets -127.
    """
    mantissa, exponent = np.frexp(amax)
    largest_mantissa, largest_exponent = np.frexp(largest)
    smallest = exponent - largest_exponent + (mantissa > largest_mantissa)
    return np.where(amax == 0, SMALLEST_SCALE, np.maximum(smallest, SMALLEST_SCALE))


def _through_blocks(x: Values, largest: float, *, mxfp4: bool) -> Values:
    """x quantised by blocks of 32 to E2M1 or E4M3 with an E8M0 scale, and read back."""
    if x.shape[-1] % BLOCK:
        raise ValueError(f"a last axis of {x.shape[-1]} is no multiple of {BLOCK}, so it can't be quantised in blocks")
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    finite = np.isfinite(amax)
    exponent = scale_exponents(np.where(finite, amax, 0), largest)
    scaled = np.ldexp(blocks, -exponent)
    values = round_e2m1(scaled) if mxfp4 else round_e4m3(scaled)
    return np.where(finite, np.ldexp(values, exponent), np.nan).reshape(x.shape)


def through_fp8_block(x: Values) -> Values:
    """x [N, K] as e4m3 with one scale for each 128 x 128 keeps it: 2^ceil(log2(amax / 448)), at least 2^-100.

    What is left at an edge is a block of its own. A block with a NaN or an infinity in it becomes NaN throughout.
    """
    result = np.empty_like(x)
    for row in range(0, x.shape[0], 128):
        for column in range(0, x.shape[1], 128):
            block = x[row : row + 128, column : column + 128]
            amax = np.abs(block).max(keepdims=True)
            if np.isfinite(amax).all():
                exponent = np.maximum(scale_exponents(amax, 448.0), -100)
                block = np.ldexp(round_e4m3(np.ldexp(block, -exponent)), exponent)
            else:
                block = np.full_like(block, np.nan)
            result[row : row + 128, column : column + 128] = block
    return result


def through_mxfp4(x: Values) -> Values:
    """x [..., K] as MXFP4 keeps it: exponent ceil(log2(amax / 6)) of each 32, nearest e2m1, ties to even.

    A block of zeros stays zeros; a block with a NaN or an infinity in it becomes NaN throughout (scale byte 255).
    """
    return _through_blocks(x, 6.0, mxfp4=True)


def through_mxfp8(x: Values) -> Values:
    """x [..., K] as MXFP8 keeps it: exponent ceil(log2(amax / 448)) of each 32, nearest e4m3, ties to even.

    A block of zeros stays zeros; a block with a NaN or an infinity in it becomes NaN throughout (scale byte 255).
    """
    return _through_blocks(x, 448.0, mxfp4=False)


def through_fp8_token(x: Values) -> Values:
    """x [..., K] as e4m3 with one scale a row keeps it: the scale is 2^ceil(log2(amax / 448)), at least 2^-126.

    A row with a NaN or an infinity in it becomes NaN throughout.
    """
    amax = np.abs(x).max(axis=-1, keepdims=True)
    finite = np.isfinite(amax)
    exponent = np.maximum(scale_exponents(np.where(finite, amax, 0), 448.0), -126)
    return np.where(finite, np.ldexp(round_e4m3(np.ldexp(x, -exponent)), exponent), np.nan)
