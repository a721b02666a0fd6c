"""Powers of two, from bits: E8M0 scale bytes, and float32 values taken apart and put together by integer operations.

A scale byte `b` means `2^(b - 127)` for 0..254 and NaN for 255. Arithmetic cannot be trusted with the ends of that
range: CPU backends flush float32 subnormals, `exp2` is inexact, and `b << 23` misreads both 0 and 255. So nothing here
multiplies, divides or takes a logarithm.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8, UInt32

BLOCK = 32  # elements that share one scale, along the last axis
BIAS = 127
NAN_BYTE = 255

_INFINITY = 0x7F80_0000
_HIDDEN = 1 << 23


def compose(negative: Array, significand: UInt32[Array, "..."], exponent: Int[Array, "..."]) -> UInt32[Array, "..."]:
    """The bits of the float32 `+-significand * 2^(exponent - 23)`, for significands of 0 or in [2^23, 2^24).

    Below the normal range the significand is shifted right, so the result is exact as long as the bits that leave are
    zeros (the low-precision formats' always are); beyond the range it is infinity.
    """
    biased = exponent + BIAS
    normal = (jnp.clip(biased, 1, 254).astype(jnp.uint32) << 23) | (significand & (_HIDDEN - 1))
    subnormal = significand >> jnp.clip(1 - biased, 0, 24).astype(jnp.uint32)
    magnitude = jnp.where(biased >= 255, jnp.uint32(_INFINITY), jnp.where(biased >= 1, normal, subnormal))
    magnitude = jnp.where(significand == 0, jnp.uint32(0), magnitude)
    return magnitude | (negative.astype(jnp.uint32) << 31)


def decompose(x: Float[Array, "..."]) -> tuple[Array, UInt32[Array, "..."], Int[Array, "..."]]:
    """`(negative, significand, exponent)` of finite float32 `x`, subnormals too: the inverse of `compose`."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    biased = ((bits >> 23) & 0xFF).astype(jnp.int32)
    fraction = bits & (_HIDDEN - 1)
    shift = jnp.where(fraction == 0, 0, jax.lax.clz(fraction).astype(jnp.int32) - 8)
    significand = jnp.where(biased == 0, fraction << shift.astype(jnp.uint32), fraction | _HIDDEN)
    exponent = jnp.where(biased == 0, 1 - BIAS - shift, biased - BIAS)
    return (bits >> 31) != 0, significand, exponent


def times_power_of_two(x: Float[Array, "..."], exponent: Int[Array, "..."]) -> Float[Array, "..."]:
    """`x * 2^exponent` in float32 for finite `x`: truncated where it is subnormal, infinite beyond the range."""
    negative, significand, own = decompose(x)
    return jax.lax.bitcast_convert_type(compose(negative, significand, own + exponent), jnp.float32)


def apply_scale(x: Float[Array, "... k"], scales: UInt8[Array, "... b"]) -> Float[Array, "... k"]:
    """`x * 2^(scale - 127)` in float32, one scale byte for 32 elements; a byte of 255 gives NaN, a NaN stays one."""
    per_element = jnp.repeat(scales, BLOCK, axis=-1)
    product = times_power_of_two(x, per_element.astype(jnp.int32) - BIAS)
    return jnp.where((per_element == NAN_BYTE) | jnp.isnan(x), jnp.float32(jnp.nan), product)


def scale_bytes(blocks: Float[Array, "... n"], largest: float) -> UInt8[Array, "..."]:
    """For each last axis of float32 `blocks` the byte of the smallest power of two with `|x| / scale <= largest`.

    That is `2^ceil(log2(amax / largest))`, so nothing saturates. Exponents below -127 become byte 0, as does an
    all-zero block; a block that holds an infinity or a NaN gets 255, which makes all of it NaN: poison stays visible.
    """
    # Magnitudes compare like their bits, which no backend flushes; the bits of infinities and NaNs are the largest.
    bits = jax.lax.bitcast_convert_type(blocks, jnp.uint32) & 0x7FFF_FFFF
    amax_bits = jnp.max(bits, axis=-1, initial=0)
    _, significand, exponent = decompose(jax.lax.bitcast_convert_type(amax_bits, jnp.float32))
    _, largest_significand, largest_exponent = decompose(jnp.float32(largest))
    needs_next = (significand > largest_significand).astype(jnp.int32)
    byte = exponent - largest_exponent + needs_next + BIAS
    byte = jnp.where(amax_bits == 0, 0, jnp.clip(byte, 0, NAN_BYTE - 1))
    return jnp.where(amax_bits >= _INFINITY, NAN_BYTE, byte).astype(jnp.uint8)


def block_scales(x: Float[Array, "... k"], largest: float) -> UInt8[Array, "... b"]:
    """`scale_bytes` of each 32 elements along the last axis."""
    return scale_bytes(x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK), largest)


def divide_by_scales(x: Float[Array, "... k"], scales: UInt8[Array, "... b"]) -> Float[Array, "... k"]:
    """`x / 2^(scale - 127)` in float32; what becomes subnormal is truncated, far below any format's step."""
    return times_power_of_two(x, BIAS - jnp.repeat(scales, BLOCK, axis=-1).astype(jnp.int32))


def require_blocks(what: str, x: Array) -> None:
    """Raises ValueError unless the last axis of floating-point `x` is a whole number of 32-element blocks."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{what} takes a floating-point array, not {x.dtype}")
    if x.ndim < 1 or x.shape[-1] % BLOCK:
        raise ValueError(
            f"{what}: shape {x.shape} must end in a multiple of {BLOCK}, the number of elements that share a scale"
        )
