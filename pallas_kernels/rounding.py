"""Rounding that a compiler cannot take back.

XLA may keep excess precision: within one computation a backend is allowed to drop a cast to a narrower type and back
(the GPU backend does), and with it a rounding that every other implementation has.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float8e4m3fn


def to_bfloat16(x: Float[Array, "..."]) -> BFloat16[Array, "..."]:
    """`x` rounded to the nearest bfloat16, ties to even: through `reduce_precision`, which always rounds."""
    if x.dtype == jnp.bfloat16:
        return x
    return jax.lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)


def to_e4m3(x: Float[Array, "..."]) -> Float8e4m3fn[Array, "..."]:
    """float32 `x` with `|x| <= 448` rounded to the nearest float8_e4m3fn, ties to even: assembled from bits."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = bits & 0x7FFF_FFFF
    # Normal numbers: round away 20 of 23 mantissa bits, a carry moving into the exponent, and rebias it from 127 to 7.
    normal = ((magnitude + 0x7_FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the step is 2^-9, that of float32 in [2^14, 2^15): adding 2^14 rounds, and the low bits are the code.
    shifted = jax.lax.bitcast_convert_type(magnitude, jnp.float32) + 2.0**14
    subnormal = jax.lax.bitcast_convert_type(shifted, jnp.uint32) & 0xF
    code = jnp.where(magnitude < ((127 - 6) << 23), subnormal, normal) | ((bits >> 31) << 7)
    return jax.lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.float8_e4m3fn)
