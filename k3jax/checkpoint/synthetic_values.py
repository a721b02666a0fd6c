"""Random weights that are the same to the byte on every platform and under every NumPy.

The randomness is raw words of the Philox generator, a fixed stream that NumPy guarantees, under a key hashed from the
seed and the tensor's name. Words become values by integer operations, table look-ups and single IEEE multiplications,
all of which are exact or correctly rounded; no `exp`, `log` or `normal`, whose last bits differ between libraries.
"""

import hashlib
import math
from collections.abc import Iterator
from functools import cache

import ml_dtypes
import numpy as np

CHUNK = 1 << 22  # Values at a time; a multiple of what one word gives, so chunks join without a seam.
CODES_RMS = 2.0  # Root mean square of the E2M1 values that `packed_codes` draws.
SCALES_RMS = 1.25  # Root mean square of 2^-1, 1, 1, 2.

# How many of 128 seven-bit numbers give each magnitude 0, .5, 1, 1.5, 2, 3, 4, 6: a normal of std 2, rounded to E2M1.
_MAGNITUDE_COUNTS = (13, 24, 23, 19, 22, 17, 8, 2)
_UNIFORMS = 12  # The sum of 12 uniforms on [0, 1) has variance 1.
_BAG = 1 << 16


def raw_words(seed: int, name: str, count: int) -> Iterator[np.ndarray]:
    """The stream of tensor `name` under `seed`: `count` little-endian uint64, at most `CHUNK // 4` at a time."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = np.random.Philox(key=int.from_bytes(digest[:16], "little"))
    for start in range(0, count, CHUNK // 4):
        yield np.asarray(generator.random_raw(min(CHUNK // 4, count - start)), dtype="<u8")


@cache
def _normals() -> np.ndarray:
    """65,536 draws from nearly a standard normal (a sum of 12 uniforms), float64, exact multiples of 2^-16."""
    words = np.concatenate(list(raw_words(0, "bag of normals", _BAG * _UNIFORMS // 4)))
    sums = words.view("<u2").reshape(_BAG, _UNIFORMS).astype(np.int64).sum(axis=1)
    return (sums - sums.sum() // _BAG).astype(np.float64) / 65536.0


def _rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """float64 `values` as `dtype`: BF16 by rounding float32's bits to nearest even, F16 and F32 by IEEE conversion."""
    if dtype == "F16":
        return values.astype(np.float16)
    single = values.astype(np.float32)
    if dtype == "F32":
        return single
    assert dtype == "BF16", dtype
    bits = single.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)


def normal_values(
    seed: int, name: str, count: int, *, std: float, mean: float = 0.0, dtype: str
) -> Iterator[np.ndarray]:
    """`count` nearly normal values of `dtype` (BF16, F16, F32), in chunks."""
    yield from _drawn(_rounded(_normals() * std + mean, dtype), seed, name, count)


def packed_codes(seed: int, name: str, count: int) -> Iterator[np.ndarray]:
    """`count` bytes of two E2M1 codes each, distributed like a normal of root mean square 2, in chunks."""
    magnitudes = np.repeat(np.arange(8, dtype=np.uint8), _MAGNITUDE_COUNTS)
    nibble = np.concatenate([magnitudes, magnitudes | 8])
    pair = nibble[np.arange(_BAG) & 0xFF] | nibble[np.arange(_BAG) >> 8] << 4
    yield from _drawn(pair, seed, name, count)


def scale_bytes(seed: int, name: str, count: int, *, gain: float) -> Iterator[np.ndarray]:
    """`count` E8M0 bytes of root mean square near `gain`: three neighbouring powers of two, the middle one twice."""
    middle = 127 + _nearest_exponent(gain / SCALES_RMS)
    assert 1 <= middle <= 253, f"{gain=} is out of a scale byte's range"
    table = np.array([middle - 1, middle, middle, middle + 1], np.uint8)
    yield from _drawn(np.tile(table, _BAG // 4), seed, name, count)


def distinct_biases(seed: int, name: str, count: int, *, std: float) -> np.ndarray:
    """`count` float32 values near a normal of `std`, all different: 34-bit sums, where the bag has only 2^16 values."""
    words = np.concatenate(list(raw_words(seed, name, count * _UNIFORMS // 4 + count)))
    sums = words[count:].view("<u2").reshape(count, _UNIFORMS).astype(np.int64).sum(axis=1) - _UNIFORMS * 32768
    fine = sums.astype(np.float64) + (words[:count] >> np.uint64(48)).astype(np.float64) / 65536.0
    biases = (fine * (std / 65536.0)).astype(np.float32)
    if len(np.unique(biases)) != count:
        raise ValueError(f"{seed=} gives equal biases for {name}; choose another seed")
    return biases


def _drawn(table: np.ndarray, seed: int, name: str, count: int) -> Iterator[np.ndarray]:
    """`count` entries of the 65,536-entry `table`, four from each word."""
    left = count
    for words in raw_words(seed, name, -(-count // 4)):
        drawn = table.take(words.view("<u2")[:left])
        left -= len(drawn)
        yield drawn


def _nearest_exponent(value: float) -> int:
    """The power of two nearest to `value` in ratio, from its bits."""
    fraction, exponent = math.frexp(value)
    return exponent if fraction > math.sqrt(0.5) else exponent - 1
