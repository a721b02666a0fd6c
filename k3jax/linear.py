"""The small pieces that layers share: a bfloat16 projection and RMSNorm, with the official rounding points."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float

from pallas_kernels.rounding import to_bfloat16


def linear(x: BFloat16[Array, "t k"], weight: BFloat16[Array, "n k"]) -> BFloat16[Array, "t n"]:
    """`x @ weight.T`, accumulated in float32 and rounded once. `weight` is (out, in), as checkpoints store it."""
    return to_bfloat16(linear_sums(x, weight))


def linear_sums(x: BFloat16[Array, "t k"], weight: BFloat16[Array, "n k"]) -> Float[Array, "t n"]:
    """`x @ weight.T` in float32, before it is rounded."""
    return jnp.dot(x, weight.T, preferred_element_type=jnp.float32)


def rms_norm(x: BFloat16[Array, "t n"], weight: BFloat16[Array, " n"], eps: float) -> BFloat16[Array, "t n"]:
    """`weight * bfloat16(x * rsqrt(mean(x^2) + eps))`: the mean in float32, the gain after the rounding."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return to_bfloat16(weight.astype(jnp.float32)[None, :] * to_bfloat16(x32 * scale).astype(jnp.float32))
