"""For whoever accepts a loss: weights with fewer different exponents, so that a kernel can hold them."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from pallas_kernels import e8m0, mxfp4
from pallas_kernels.mxfp4 import MXFP4Array


@functools.partial(jax.jit, static_argnames="span")
def narrow(w: MXFP4Array, *, span: int) -> tuple[MXFP4Array, Float32[Array, " g"]]:
    """Re-encodes the blocks of `w [G, N, K]` whose scale is too small beside their expert's largest.

    Within each expert at most `span` consecutive scale bytes remain: a smaller scale is raised to the least of them,
    and the block's values are rounded to what that can express.

    Returns:
        The weights, and for each expert the relative L2 error that this adds (0 where nothing changed).
    """

    def one(expert: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        codes, scales = expert
        byte = scales.astype(jnp.int32)
        most = jnp.max(byte)
        raised = jnp.maximum(byte, most - span + 1)
        # Relative to the largest exponent, so that no value leaves float32's range.
        own, new = (jnp.clip(b - most + e8m0.BIAS, 0, 254).astype(jnp.uint8) for b in (byte, raised))
        values = MXFP4Array(codes, own).dequantize(jnp.float32)
        narrowed = MXFP4Array(mxfp4.encode(values, new), new)
        error = jnp.linalg.norm(narrowed.dequantize(jnp.float32) - values)
        size = jnp.linalg.norm(values)
        return narrowed.codes, raised.astype(jnp.uint8), jnp.where(error == 0, 0.0, error / size)

    codes, scales, lost = jax.lax.map(one, (w.codes, w.scales))
    return MXFP4Array(codes, scales), lost
