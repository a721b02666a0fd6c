"""For whoever accepts a loss: weights with fewer different exponents, so that a kernel can hold them."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from pallas_kernels import e8m0, mxfp4
from pallas_kernels.mxfp4 import MXFP4Array

_VANISHED = 40  # octaves below its new scale at which every value of a block has rounded to zero


@functools.partial(jax.jit, static_argnames="span")
def narrow(w: MXFP4Array, *, span: int) -> tuple[MXFP4Array, Bool[Array, " g"], Float32[Array, " g"]]:
    """Re-encodes the blocks of `w [G, N, K]` whose scale is too small beside their expert's largest.

    Within each expert at most `span` consecutive scale bytes remain: a smaller scale is raised to the least of them,
    and the block's values are rounded to what that can express.

    Returns:
        The weights; which experts' values changed, however little; and the relative L2 error that this adds to each
        (0 also where float32 cannot tell it from none).
    """

    def one(expert: tuple[Array, Array]) -> tuple[Array, Array, Array, Array]:
        codes, scales = expert
        byte = scales.astype(jnp.int32)
        most = jnp.max(byte)
        raised = jnp.maximum(byte, most - span + 1)
        # Each block relative to its new scale, so that no value leaves float32's range however far apart blocks are.
        own = (e8m0.BIAS - jnp.minimum(raised - byte, _VANISHED)).astype(jnp.uint8)
        new = jnp.full_like(own, e8m0.BIAS)
        values = MXFP4Array(codes, own).dequantize(jnp.float32)
        narrowed = mxfp4.encode(values, new)
        error = MXFP4Array(narrowed, new).dequantize(jnp.float32) - values
        weight = jnp.repeat(jnp.exp2((raised - most).astype(jnp.float32)), e8m0.BLOCK, axis=-1)
        lost = jnp.linalg.norm(error * weight) / jnp.linalg.norm(values * weight)
        changed = jnp.any(error != 0)
        return narrowed, raised.astype(jnp.uint8), changed, jnp.where(changed, lost, 0.0)

    codes, scales, changed, lost = jax.lax.map(one, (w.codes, w.scales))
    return MXFP4Array(codes, scales), changed, lost
