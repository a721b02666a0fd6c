"""The small pieces that layers share: their dense weights, and RMSNorm with the official rounding points."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, BFloat16

from pallas_kernels import FP8BlockArray
from pallas_kernels.rounding import to_bfloat16

Weight = Array | FP8BlockArray
"""bfloat16, or e4m3 with block scales, of which every value is exact in bfloat16."""


class FrozenWeight(nnx.Variable):
    """A quantised weight. Not an `nnx.Param`: nothing trains or casts it."""


def weight_variable(weight: Weight, axes: tuple[str | None, ...]) -> nnx.Variable:
    """The variable that holds `weight` in a layer."""
    return FrozenWeight(weight, axes=axes) if isinstance(weight, FP8BlockArray) else nnx.Param(weight, axes=axes)


def rms_norm(x: BFloat16[Array, "t n"], weight: BFloat16[Array, " n"], eps: float) -> BFloat16[Array, "t n"]:
    """`weight * bfloat16(x * rsqrt(mean(x^2) + eps))`: the mean in float32, the gain after the rounding."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return to_bfloat16(weight.astype(jnp.float32)[None, :] * to_bfloat16(x32 * scale).astype(jnp.float32))
