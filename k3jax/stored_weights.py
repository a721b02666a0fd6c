"""One weight matrix as bfloat16, from however the checkpoint stores it."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from k3jax.checkpoint import LayerTensors
from pallas_kernels import MXFP4Array, dequantize_nvfp4

BF16 = np.dtype(ml_dtypes.bfloat16)


def bf16_weight(tensors: LayerTensors, stem: str) -> np.ndarray:
    """The weight `stem` as bfloat16 `[N, K]`: exact from MXFP4 and BF16, rounded from NVFP4, F16 and F32."""
    stored = tensors.stored[stem]
    if stored == "mxfp4":
        return np.asarray(_dequantize(tensors[f"{stem}.weight_packed"], tensors[f"{stem}.weight_scale"]))
    weight = tensors[f"{stem}.weight"]
    if stored == "nvfp4":
        global_scale = tensors[f"{stem}.weight_scale_2"].reshape(())
        return np.asarray(dequantize_nvfp4(weight, tensors[f"{stem}.weight_scale"], global_scale))
    return weight.astype(BF16, copy=False)


@jax.jit
def _dequantize(codes: jax.Array, scales: jax.Array) -> jax.Array:
    return MXFP4Array(codes, scales).dequantize(jnp.bfloat16)
