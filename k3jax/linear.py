"""The small pieces that layers share: a bfloat16 projection and RMSNorm, with the official rounding points."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, BFloat16, Float

from pallas_kernels import FP8BlockArray
from pallas_kernels.rounding import to_bfloat16

Weight = Array | FP8BlockArray
"""bfloat16, or e4m3 with block scales, of which every value is exact in bfloat16."""


class FrozenWeight(nnx.Variable):
    """A quantised weight. Not an `nnx.Param`: nothing trains or casts it."""


def weight_variable(weight: Weight, axes: tuple[str | None, ...]) -> nnx.Variable:
    """The variable that holds `weight` in a layer."""
    return FrozenWeight(weight, axes=axes) if isinstance(weight, FP8BlockArray) else nnx.Param(weight, axes=axes)


def linear(x: BFloat16[Array, "t k"], weight: Weight) -> BFloat16[Array, "t n"]:
    """`x @ weight.T`, accumulated in float32, rounded once. `weight [N, K]` is (out, in), as checkpoints store it."""
    return to_bfloat16(linear_sums(x, weight))


def linear_sums(x: BFloat16[Array, "t k"], weight: Weight) -> Float[Array, "t n"]:
    """`x @ weight.T` in float32, before it is rounded. Leading axes of `weight [..., N, K]` join its rows."""
    values = weight.dequantize() if isinstance(weight, FP8BlockArray) else weight
    return jnp.dot(x, values.reshape(-1, values.shape[-1]).T, preferred_element_type=jnp.float32)


def rms_norm(x: BFloat16[Array, "t n"], weight: BFloat16[Array, " n"], eps: float) -> BFloat16[Array, "t n"]:
    """`weight * bfloat16(x * rsqrt(mean(x^2) + eps))`: the mean in float32, the gain after the rounding."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return to_bfloat16(weight.astype(jnp.float32)[None, :] * to_bfloat16(x32 * scale).astype(jnp.float32))
