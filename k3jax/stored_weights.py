"""One weight matrix as a layer wants it, bfloat16 or MXFP4, from however the checkpoint stores it."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from k3jax.checkpoint import LayerTensors
from pallas_kernels import MXFP4Array, dequantize_nvfp4, quantize_mxfp4

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


def mxfp4_weight(tensors: LayerTensors, stem: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes `[N, K/2]` and scales `[N, K/32]` of the weight `stem`: as stored, or quantised from bfloat16."""
    if tensors.stored[stem] == "mxfp4":
        return tensors[f"{stem}.weight_packed"], tensors[f"{stem}.weight_scale"]
    matrix = _quantize(bf16_weight(tensors, stem))
    return np.asarray(matrix.codes), np.asarray(matrix.scales)


@jax.jit
def _dequantize(codes: jax.Array, scales: jax.Array) -> jax.Array:
    return MXFP4Array(codes, scales).dequantize(jnp.bfloat16)


_quantize = jax.jit(quantize_mxfp4)
