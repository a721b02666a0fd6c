"""The record of a converted layer, held to the model's config and to what lies on disk before an array is read."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from k3jax.config import K3Config
from k3jax.convert.named_arrays import named_arrays
from k3jax.convert.storage import ARRAYS
from k3jax.convert.target import LAYER, layer_folder, read_record
from k3jax.moe_shapes import FP8_NAMES, array_shapes
from k3jax.strict_json import shown
from pallas_kernels import MXFP4Array, quantize_fp8_block, to_kernel_layout

_AGAIN = "remove that folder and convert again"


def read_layer_record(target: Path, record: Mapping[str, Any], config: K3Config, layer: int) -> dict[str, Any]:
    """What `target` says of `layer`: which arrays there are is what `config` makes them, and they can be on the disk.

    Raises:
        FileNotFoundError: there is none. ValueError: it is damaged, or its folder holds something else than files.
    """
    folder = layer_folder(target, layer)
    of_layer = read_record(folder / LAYER)
    if of_layer["layer"] != layer or type(of_layer["layer"]) is not int:
        raise ValueError(f"{folder / LAYER} is of layer {shown(of_layer['layer'])}; {_AGAIN}")
    kinds = ("mxfp4", "bf16", "mosaic") if config.is_moe(layer) else (None,)
    if of_layer["experts"] not in kinds:
        raise ValueError(f"{folder / LAYER}: experts {shown(of_layer['experts'])} is not one of {kinds}; {_AGAIN}")
    on_disk, shapes = _bytes_of_files(folder / ARRAYS), _shapes(config, layer)
    # Before anything else is made of the sizes in the config.
    least = sum(math.prod(shape) for shape in shapes.values()) // 2  # four bits a value
    if least > on_disk:
        raise ValueError(f"{folder}: a layer of this config takes {least} bytes or more, not {on_disk}; {_AGAIN}")
    try:
        expected = _expected(shapes, of_layer["experts"], fp8=record["dense_weights"] == "fp8")
    except NotImplementedError as error:  # of that kernel, for these sizes
        raise ValueError(f"{folder / LAYER}: experts cannot be {of_layer['experts']}: {error}; {_AGAIN}") from error
    _require_arrays(of_layer["arrays"], expected, folder / LAYER)
    return of_layer


def bytes_of_arrays(of_layer: Mapping[str, Any]) -> int:
    """What the arrays take."""
    arrays = of_layer["arrays"].values()
    return sum(math.prod(array["shape"]) * jnp.dtype(array["dtype"]).itemsize for array in arrays)


def _bytes_of_files(folder: Path) -> int:
    """Of all files in `folder`, which holds nothing else: a link could lead out of it, and a pipe would never end."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is neither a file nor a folder; {_AGAIN}")
        total += path.stat().st_size if path.is_file() else 0
    return total


def _shapes(config: K3Config, layer: int) -> dict[str, tuple[int, ...]]:
    if config.is_moe(layer):
        return array_shapes(config)
    width, hidden = config.intermediate_size, config.hidden_size
    return {"gate_up": (2, width, hidden), "down": (hidden, width)}


def _expected(shapes: Mapping[str, tuple[int, ...]], experts: str | None, *, fp8: bool) -> dict[str, tuple[str, Any]]:
    """The dtype and shape of every array, by name."""
    weights: dict[str, Any] = {}
    for name, shape in shapes.items():
        weights[name] = jax.ShapeDtypeStruct(shape, jnp.float32 if name == "router_bias" else jnp.bfloat16)
        if fp8 and name in (*FP8_NAMES, "gate_up", "down"):
            weights[name] = jax.eval_shape(quantize_fp8_block, weights[name])
        if name not in ("w13", "w2") or experts == "bf16":
            continue
        rows = (shape[0], math.prod(shape[1:-1])) if experts == "mosaic" else shape[:-1]
        codes, scales = (jax.ShapeDtypeStruct((*rows, shape[-1] // of), jnp.uint8) for of in (2, 32))
        weights[name] = MXFP4Array.tree_unflatten(None, (codes, scales))
        if experts == "mosaic":
            weights[name] = to_kernel_layout(weights[name], recipe="w4a16", gated=name == "w13")
    return {name: (str(array.dtype), list(array.shape)) for name, array in named_arrays(weights).items()}


def _require_arrays(found: Any, expected: Mapping[str, tuple[str, Any]], path: Path) -> None:
    if not isinstance(found, dict) or found.keys() != expected.keys():
        names = ", ".join(expected)
        raise ValueError(f"{path}: arrays {shown(found)} are not those of this model's layer, {names}; {_AGAIN}")
    for name, (dtype, shape) in expected.items():
        said = found[name]
        if not isinstance(said, dict) or [said.get("dtype"), said.get("shape")] != [dtype, shape]:
            raise ValueError(f"{path}: array {name} is {shown(said)}, the config makes it {dtype} {shape}; {_AGAIN}")
        if not isinstance(said.get("sha256"), str):
            raise ValueError(f"{path}: array {name} has no sha256; {_AGAIN}")
