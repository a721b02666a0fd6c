"""The number formats again, in NumPy and float64, from ml_dtypes' tables: what the tests hold the package to.

Nothing here is shared with the package or with the oracle: values are looked up, and a block's scale byte is found by
searching the table of the 255 largest magnitudes that the scales can hold.
"""

import ml_dtypes
import numpy as np

E2M1 = ml_dtypes.float4_e2m1fn
E4M3 = ml_dtypes.float8_e4m3fn
BF16 = ml_dtypes.bfloat16
BLOCK = 32


def powers_of_two() -> np.ndarray:
    """What each of the 256 scale bytes means, in float64."""
    return np.append(np.ldexp(1.0, np.arange(-127, 128)), np.nan)


def every_value(dtype: type[np.generic], bits: int) -> np.ndarray:
    """All finite values of a narrow type in increasing order, each zero once, in float32."""
    values = np.arange(2**bits, dtype=np.uint8).view(dtype).astype(np.float32)
    return np.unique(values[np.isfinite(values)])


def unpack_codes(codes: np.ndarray) -> np.ndarray:
    """uint8 `[..., K/2]` -> E2M1 codes `[..., K]`, low nibble first."""
    out = np.empty((*codes.shape[:-1], codes.shape[-1] * 2), np.uint8)
    out[..., 0::2] = codes % 16
    out[..., 1::2] = codes // 16
    return out


def decode_mxfp4(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float64 `[..., K]` of packed codes `[..., K/2]` and scale bytes `[..., K/32]`."""
    return unpack_codes(codes).view(E2M1).astype(np.float64) * np.repeat(powers_of_two()[scales], BLOCK, axis=-1)


def decode_mxfp8(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float64 `[..., K]` of E4M3 values `[..., K]` and scale bytes `[..., K/32]`."""
    return values.astype(np.float64) * np.repeat(powers_of_two()[scales], BLOCK, axis=-1)


def scale_bytes(x: np.ndarray, largest: float) -> np.ndarray:
    """For each 32 elements the first byte whose scale holds all of them, 255 where one is not finite."""
    blocks = np.abs(x.astype(np.float64)).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    held = np.ldexp(largest, np.arange(-127, 128))  # exact
    byte = np.searchsorted(held, blocks.max(axis=-1), side="left")
    return np.where(np.isfinite(blocks).all(axis=-1), byte, 255).astype(np.uint8)


def encode_mxfp4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E2M1 codes `[..., K]`, unpacked, and scale bytes `[..., K/32]`. Blocks that are not finite have codes 0."""
    scales = scale_bytes(x, 6.0)
    codes = _divided(x, scales).astype(E2M1).view(np.uint8)
    return codes, scales


def encode_mxfp8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E4M3 values `[..., K]` and scale bytes `[..., K/32]`. Blocks that are not finite have values 0."""
    scales = scale_bytes(x, 448.0)
    return _divided(x, scales).astype(E4M3), scales


def encode_fp8_token(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E4M3 values `[..., K]` and float32 scales `[..., 1]` of finite rows, K > 0."""
    held = np.ldexp(448.0, np.arange(-127, 128))
    byte = np.searchsorted(held, np.abs(x.astype(np.float64)).max(axis=-1, keepdims=True), side="left")
    exponent = np.maximum(byte - 127, -126)
    return np.ldexp(x.astype(np.float64), -exponent).astype(E4M3), np.ldexp(np.float32(1), exponent)


def _divided(x: np.ndarray, scales: np.ndarray) -> np.ndarray:
    per_element = np.repeat(scales, BLOCK, axis=-1)
    return np.where(per_element == 255, 0.0, x.astype(np.float64)) * np.ldexp(1.0, 127 - per_element.astype(np.int32))
