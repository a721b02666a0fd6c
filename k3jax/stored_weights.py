"""Weights as checkpoints store them, and as layers want them: what is converted, refused or told."""

import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from k3jax.checkpoint import LayerTensors
from k3jax.checkpoint.tensor_table import EXPERTS
from k3jax.experts import RECIPES
from k3jax.options import LoadOptions
from pallas_kernels import MXFP4Array, dequantize_nvfp4

BF16 = np.dtype(ml_dtypes.bfloat16)
_log = logging.getLogger("k3jax")


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


def require_storage(tensors: LayerTensors, recipe: str, options: LoadOptions, path: Path) -> None:
    """Raises ValueError if experts would have to be quantised for the recipe, and that was not asked for."""
    stems = (stem for stem, stored in tensors.stored.items() if stem.startswith(EXPERTS) and stored != "mxfp4")
    other = next(stems, None)
    if other is not None and RECIPES[recipe].packed and not options.quantize_plain:
        how = "in NVFP4" if tensors.stored[other] == "nvfp4" else f"plain, in {tensors.dtype(f'{other}.weight')}"
        raise ValueError(
            f"{path}: {other}.weight is stored {how}, and {recipe=} needs experts in MXFP4; "
            'load with recipe="bf16", or pass LoadOptions(quantize_plain=True) to quantise them now'
        )


def log_rounding(tensors: LayerTensors, layer: int, path: Path) -> None:
    """One line of the "k3jax" logger if any of the layer's tensors lose something on their way to bfloat16."""
    plain = [tensors.dtype(f"{stem}.weight") for stem, stored in tensors.stored.items() if stored == "plain"]
    rounded = [str(dtype) for dtype in plain if dtype != BF16]
    rounded += ["NVFP4" for stored in tensors.stored.values() if stored == "nvfp4"]
    if rounded:
        names = " and ".join(sorted(set(rounded)))
        _log.warning("%s: layer %d: %d tensors stored as %s are rounded to bfloat16", path, layer, len(rounded), names)


@jax.jit
def _dequantize(codes: jax.Array, scales: jax.Array) -> jax.Array:
    return MXFP4Array(codes, scales).dequantize(jnp.bfloat16)
