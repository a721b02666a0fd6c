"""A layer's weights as arrays with names (`w13.codes`, `latent_up`), and back: what a converted layer consists of."""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from pallas_kernels import FP8BlockArray, KernelWeights, MXFP4Array

_AT_A_TIME = 64 << 20  # bytes copied from a device to be digested

Weights = Mapping[str, Any]
"""Fields of `MoEArrays` that are not None, or `gate_up` and `down`."""


def named_arrays(weights: Weights) -> dict[str, Any]:
    """Every array of `weights` under its own name, or what there is of it: its shape and dtype."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(dict(weights))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def kind_of_experts(weights: Weights) -> str:
    """How the experts are kept: "mxfp4", "bf16", or "mosaic" for that kernel's layout."""
    w = weights["w13"]
    assert not isinstance(w, KernelWeights) or w.mma == "bf16", "loading lays out for no other products"
    if isinstance(w, KernelWeights):
        return "mosaic"
    assert isinstance(w, MXFP4Array | jax.Array), type(w)
    return "mxfp4" if isinstance(w, MXFP4Array) else "bf16"


def weights_of(arrays: Mapping[str, jax.Array], experts: str | None) -> dict[str, Any]:
    """The inverse of `named_arrays`; `experts` is what `kind_of_experts` said, None for a dense layer."""
    weights: dict[str, Any] = {name: array for name, array in arrays.items() if "." not in name}
    for name in arrays:
        field, _, leaf = name.partition(".")
        if leaf == "values":
            weights[field] = FP8BlockArray(arrays[name], arrays[f"{field}.scales"])
    for name, gated in (("w13", True), ("w2", False)):
        if experts == "mxfp4":
            weights[name] = MXFP4Array(arrays[f"{name}.codes"], arrays[f"{name}.scales"])
        elif experts == "mosaic":
            weights[name] = KernelWeights(arrays[f"{name}.words"], arrays[f"{name}.exponents"], "bf16", gated)
    return weights


def digest(array: jax.Array) -> str:
    """The SHA-256 of the array's bytes in C order, copied to the host part by part."""
    sha = hashlib.sha256()
    rows = max(1, _AT_A_TIME // max(array.nbytes // max(len(array), 1), 1))
    for start in range(0, len(array), rows):
        part = array if rows >= len(array) else array[start : start + rows]
        sha.update(np.ascontiguousarray(np.asarray(part)).view(np.uint8).data)
    return sha.hexdigest()


def description(arrays: Mapping[str, jax.Array]) -> dict[str, dict[str, Any]]:
    """Name -> dtype, shape and digest of each array."""
    return {
        name: {"dtype": str(array.dtype), "shape": list(array.shape), "sha256": digest(array)}
        for name, array in sorted(arrays.items())
    }
