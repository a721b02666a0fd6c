"""`k3jax convert`: layer by layer from a checkpoint to a target folder, and the check of what lies there."""

import dataclasses
import functools
import gc
import json
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from k3jax.byte_count import ByteCount, Told
from k3jax.checkpoint import CONFIG, Checkpoint, LayerTensors
from k3jax.config import K3Config
from k3jax.convert.layer_record import read_layer_record
from k3jax.convert.named_arrays import Weights, description, digest, kind_of_experts, named_arrays
from k3jax.convert.restore import MLP_AXES, read_weights, require_fresh
from k3jax.convert.source import model_digests, shards_of
from k3jax.convert.storage import save
from k3jax.convert.target import (
    FORMAT,
    LAYER,
    LAYOUT_VERSION,
    TARGET,
    converted_layers,
    is_converted,
    layer_folder,
    locked,
    new_layer,
    read_record,
    write_record,
)
from k3jax.expert_stream import Progress
from k3jax.experts import RECIPES
from k3jax.kernel_placement import Place
from k3jax.layer_arrays import LayerArrays
from k3jax.mlp import mlp_layout
from k3jax.moe import moe_layout
from k3jax.moe_shapes import AXES
from k3jax.options import DEFAULTS, LoadOptions
from k3jax.stored_weights import log_rounding, require_storage
from pallas_kernels import lay_out, to_kernel_layout
from sharding import Layout, mesh_sizes

IMPLEMENTATIONS = ("reference", "xla", "mosaic")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What to convert.

    Attributes:
        layers: numbers, None for all. implementation: "mosaic" for that kernel's layout, which any machine can write;
            "xla" or "reference" for the checkpoint's own; None for what a layer would have on this device, or the
            checkpoint's own where the mesh splits the experts' width.
        mesh: what a layer is spread over while it is converted; what is written is the same.
    """

    source: Path
    target: Path
    layers: tuple[int, ...] | None = None
    recipe: str = "w4a16"
    implementation: str | None = None
    mesh: Mesh | None = None
    options: LoadOptions = DEFAULTS


@dataclasses.dataclass(frozen=True)
class Result:
    """Layers written now, layers that were there, and which of those written replace stale ones, or damaged records."""

    written: tuple[int, ...]
    kept: tuple[int, ...]
    renewed: tuple[int, ...]


def convert(request: Request, progress: Told | None = None) -> Result:
    """Writes the layers that the target lacks, or whose source has changed. Each appears whole, or not at all.

    Raises:
        FileNotFoundError, ValueError, NotImplementedError: what `load_layers` raises; or the target holds something
            else, was made from another model or in another way, or is being written to by another process.
        OSError: the target cannot be written.
    """
    checkpoint = Checkpoint.open(request.source)
    record = _record(request, checkpoint)
    numbers = range(checkpoint.config.num_hidden_layers) if request.layers is None else request.layers
    located = {layer: checkpoint.read_layer(layer) for layer in numbers}
    for tensors in located.values():
        require_storage(tensors, request.recipe, request.options, checkpoint.path)
    written, kept, renewed = [], [], []
    count = ByteCount(sum(tensors.nbytes for tensors in located.values()), progress)
    with locked(request.target):
        _claim(request.target, record)
        for layer, tensors in located.items():
            folder = layer_folder(request.target, layer)
            is_there = (folder / LAYER).exists()
            with count.layer(layer, tensors.nbytes) as told:
                if is_there and _is_fresh(folder / LAYER, tensors):
                    kept.append(layer)
                    continue
                _write_layer(request, checkpoint.config, layer, tensors, told)
            written.append(layer)
            renewed += [layer] * is_there
            gc.collect()
    return Result(tuple(written), tuple(kept), tuple(renewed))


def _is_fresh(path: Path, tensors: LayerTensors) -> bool:
    try:
        return read_record(path)["shards"] == shards_of(tensors)
    except ValueError:  # damaged
        return False


def verify(target: Path, progress: Told = lambda done, total, what: None) -> list[str]:
    """Reads every converted layer back; what is wrong, in words: nothing if all is as it was written and still fresh.

    Raises:
        FileNotFoundError, ValueError: `target` is no folder that `convert` wrote.
    """
    record = read_record(target / TARGET)
    config = K3Config.from_dict(record["config"])
    layers, wrong = converted_layers(target), []
    if not layers:
        wrong.append(f"{target} holds no layer")
    for done, layer in enumerate(layers):
        progress(done, len(layers), f"layer {layer}")
        folder = layer_folder(target, layer)
        try:
            of_layer = read_layer_record(target, record, config, layer)
            require_fresh(record, of_layer, layer, target)
            _require_as_written(folder, of_layer)
        except (ValueError, OSError) as error:
            wrong.append(str(error))
        gc.collect()
    progress(len(layers), len(layers), "done")
    return wrong


def _record(request: Request, checkpoint: Checkpoint) -> dict[str, Any]:
    """What is the same for all layers of a target."""
    if request.recipe not in RECIPES:
        raise ValueError(f"recipe={request.recipe!r} is not one of {', '.join(RECIPES)}")
    if request.implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation={request.implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    if request.implementation == "mosaic" and _splits_width(request):
        raise NotImplementedError(
            "a kernel's layout of a part of each expert's width is no use on another mesh: convert with tensor=1, and "
            "load_layers splits what was written over any mesh"
        )
    if jax.process_count() > 1:
        raise NotImplementedError("k3jax convert runs in one process; load_layers reads what it wrote in several")
    return {
        "format": FORMAT,
        "layout_version": LAYOUT_VERSION,
        "source": str(request.source.absolute()),
        "model": model_digests(checkpoint),
        "config": json.loads((request.source / CONFIG).read_bytes()),
        "recipe": request.recipe,
        "dense_weights": request.options.dense_weights,
        "implementation": request.implementation,
    }


def _claim(target: Path, record: dict[str, Any]) -> None:
    """Writes the target's record, or holds the one that is there to it."""
    if not is_converted(target):
        write_record(target / TARGET, record)
        return
    found = read_record(target / TARGET)
    for name, value in record.items():
        if name != "source" and found.get(name) != value:
            what = "another config" if name == "config" else f"{name} {found.get(name)!r}, not {value!r}"
            raise ValueError(f"{target} was made from or with {what}; name another folder for this conversion")
    if found.get("source") != record["source"]:  # the same model in another place
        write_record(target / TARGET, record)


def _write_layer(request: Request, config: K3Config, layer: int, tensors: LayerTensors, progress: Progress) -> None:
    log_rounding(tensors, layer, request.source)
    weights = _weights(request, config, layer, tensors, progress)
    tensors.require_unchanged()
    arrays = named_arrays(weights)
    of_layer = {
        "layer": layer,
        "experts": kind_of_experts(weights) if config.is_moe(layer) else None,
        "arrays": description(arrays),
        "shards": shards_of(tensors),
    }
    with new_layer(request.target, layer) as folder:
        save(folder, arrays)
        del arrays, weights  # the layer need not be in memory twice
        gc.collect()
        _require_as_written(folder, of_layer)
        write_record(folder / LAYER, of_layer)


def _weights(request: Request, config: K3Config, layer: int, tensors: LayerTensors, progress: Progress) -> Weights:
    options = request.options
    if not config.is_moe(layer):
        layout = mlp_layout(config.intermediate_size, request.mesh, "replicated", options)
        gate_up, down = LayerArrays(tensors, layout, options, progress).mlp("mlp.", "mlp_ff")
        return {"gate_up": gate_up, "down": down}
    layout = moe_layout(config, request.recipe, request.mesh, "replicated", options)
    arrays = LayerArrays(tensors, layout, options, progress)
    moe = arrays.moe(config, packed=RECIPES[request.recipe].packed, place=_place(request))
    return {name: array for name, array in vars(moe).items() if array is not None}


def _place(request: Request) -> Place | None:
    """Gives the experts the layout that was asked for; None for the checkpoint's own."""
    if request.implementation in ("xla", "reference"):
        return None
    # With the products that every recipe has there: what restores a layer for others lays it out again.
    if request.implementation == "mosaic":  # which may be for another device than this
        return functools.partial(to_kernel_layout, recipe="w4a16")
    return None if _splits_width(request) else functools.partial(lay_out, recipe="w4a16")


def _splits_width(request: Request) -> bool:
    return request.mesh is not None and mesh_sizes(request.mesh).tensor > 1


def _require_as_written(folder: Path, of_layer: dict[str, Any]) -> None:
    """Raises ValueError unless the arrays that `folder` gives back have the digests in the record."""
    axes = MLP_AXES if of_layer["experts"] is None else AXES
    arrays = named_arrays(read_weights(folder, of_layer, Layout(), axes))
    for name, array in arrays.items():
        if digest(array) != of_layer["arrays"][name]["sha256"]:
            raise ValueError(f"{folder}: array {name} is not what was written; remove that folder and convert again")
