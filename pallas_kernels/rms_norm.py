"""RMSNorm of sums, with the official rounding points."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float

from pallas_kernels import row_kernels, select
from pallas_kernels.rounding import to_bfloat16


@functools.partial(jax.jit, static_argnames=("eps", "implementation"))
def rms_norm(
    x: Float[Array, "... n"], weight: BFloat16[Array, " n"], *, eps: float, implementation: str | None = None
) -> BFloat16[Array, "... n"]:
    """`weight * bfloat16(x * rsqrt(mean(x^2) + eps))` of `x` rounded to bfloat16; the mean in float32.

    Args:
        x: `[..., N]`, bfloat16 or float32. weight: the gain `[N]`. implementation: "reference" or "xla" (the formula),
            "mosaic" (Hopper and Blackwell, float32 rows of 4,096 at most, a multiple of 8: one kernel), or None for the
            fastest that can.

    Returns:
        bfloat16. Implementations differ by the order of the mean's sum.

    Raises:
        ValueError: `weight` is not of the rows' width, or no such implementation exists.
        NotImplementedError: the named implementation cannot run this here.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight has shape {weight.shape}, and must have that of a row, {x.shape[-1:]}")
    chosen = select.choose("rms_norm", implementation, x=x)
    if chosen in row_kernels.IMPLEMENTATIONS:
        return row_kernels.of(chosen).rms_norm(eps, x, weight)
    return normalize(eps, x, weight)


def normalize(eps: float, x: Float[Array, "... n"], weight: BFloat16[Array, " n"]) -> BFloat16[Array, "... n"]:
    """The formula of `rms_norm`."""
    rounded = to_bfloat16(x).astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(rounded), axis=-1, keepdims=True) + eps)
    normed = to_bfloat16(rounded * scale).astype(jnp.float32)
    return to_bfloat16(jnp.expand_dims(weight.astype(jnp.float32), range(x.ndim - 1)) * normed)
