"""Rounding to bfloat16 that a compiler cannot take back."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float


def to_bfloat16(x: Float[Array, "..."]) -> BFloat16[Array, "..."]:
    """`x` rounded to the nearest bfloat16, ties to even.

    XLA may keep excess precision: within one computation its backends are allowed to drop a cast to bfloat16 and back,
    and with it a rounding point that every other implementation has. `reduce_precision` always rounds.
    """
    if x.dtype == jnp.bfloat16:
        return x
    return jax.lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)
