"""NVFP4, for reading alone: four-bit E2M1 codes, an e4m3 scale for each 16 along the last axis, one float32 scale.

value = (-1)^(code >> 3) * (0, 0.5, 1, 1.5, 2, 3, 4, 6)[code & 7] * scale * global_scale
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32, UInt8

BLOCK = 16  # elements that share an e4m3 scale


@jax.jit
def dequantize_nvfp4(
    codes: UInt8[Array, "n half"], scales: Float[Array, "n b"], global_scale: Float32[Array, ""]
) -> BFloat16[Array, "n k"]:
    """uint8 codes `[N, K/2]` (low nibble first), e4m3 scales `[N, K/16]` and a scalar -> bfloat16 `[N, K]`.

    Code times block scale is exact in float32; its product with the global scale is rounded there, then to bfloat16.

    Raises:
        ValueError: the shapes do not belong together, or the scales are not e4m3.
    """
    rows, half = codes.shape
    if scales.dtype != jnp.float8_e4m3fn or scales.shape != (rows, half * 2 // BLOCK) or half * 2 % BLOCK:
        raise ValueError(
            f"dequantize_nvfp4: codes {codes.shape} need float8_e4m3fn scales [N, K/{BLOCK}], not "
            f"{scales.dtype}{list(scales.shape)}"
        )
    magnitudes = jnp.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], jnp.float32)
    values = jnp.concatenate([magnitudes, -magnitudes])
    pairs = jnp.stack([codes & 0xF, codes >> 4], axis=-1)
    blocks = values[pairs.reshape(*scales.shape, BLOCK)] * scales.astype(jnp.float32)[..., None]
    return (blocks * global_scale).astype(jnp.bfloat16).reshape(rows, half * 2)
