"""Adapters apart from the experts they sit on: one safetensors file a layer."""

import os
import uuid
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from k3jax.adapters import ExpertAdapters
from k3jax.checkpoint.safetensors_file import SafetensorsFile
from k3jax.checkpoint.safetensors_writer import NewTensor, write_header, write_tensor
from k3jax.merging import add_adapters
from k3jax.moe import MoE

FORMAT = "k3jax-adapters-1"
_NAMES = ("a13", "b13", "a2", "b2")


def save_adapters(layer: MoE, path: str | Path) -> Path:
    """Writes the adapters of `layer` to the file `path`, which it replaces at once or not at all.

    Raises:
        ValueError: the layer has no adapters.
    """
    if layer.adapters is None:
        raise ValueError("the layer has no adapters to save")
    own, path = layer.adapters.arrays(), Path(path)
    arrays = {name: np.asarray(getattr(own, name)) for name in _NAMES}
    tensors = [NewTensor(name, "BF16", array.shape) for name, array in arrays.items()]
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}.unfinished")
    try:
        with unfinished.open("xb") as file:
            write_header(file, tensors, {"format": FORMAT, "scale": repr(own.scale)})
            for tensor in tensors:
                write_tensor(file, tensor, [arrays[tensor.name]])
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def load_adapters(layer: MoE, path: str | Path) -> None:
    """Puts the adapters of the file `path` on `layer`, in place.

    Raises:
        FileNotFoundError, ValueError: there is no such file, it holds no adapters, or those of a layer of other sizes.
        ValueError, NotImplementedError: the layer cannot take adapters; see `add_adapters`.
    """
    file = SafetensorsFile(path)
    if file.metadata.get("format") != FORMAT or set(file) != set(_NAMES):
        raise ValueError(f"{file.path} is no file of adapters: {FORMAT} with the tensors {', '.join(_NAMES)}")
    try:
        scale = float(file.metadata["scale"])
    except (KeyError, ValueError):
        raise ValueError(f"{file.path}: metadata scale={file.metadata.get('scale')!r} must be a number") from None
    shape = file.entries["a13"].shape
    if len(shape) != 3 or not shape[1]:
        raise ValueError(f"{file.path}: a13 has shape {shape}; it must be [experts or 1, rank, latent]")
    make: dict[str, Any] = {"rank": shape[1], "scale": scale, "shared": shape[0] == 1}
    expected = nnx.eval_shape(lambda: ExpertAdapters(layer.config, rngs=nnx.Rngs(0), **make))
    for name in _NAMES:
        wanted, entry = getattr(expected, name).get_value(), file.entries[name]
        if entry.shape != wanted.shape or entry.dtype != "BF16":
            raise ValueError(f"{file.path}: {name} is {entry.dtype} {entry.shape}; the layer takes BF16 {wanted.shape}")
    add_adapters(layer, rngs=nnx.Rngs(0), **make)
    assert layer.adapters is not None
    for name in _NAMES:
        variable: nnx.Param = getattr(layer.adapters, name)
        variable.set_value(jax.device_put(jnp.asarray(file[name]), variable[...].sharding))
