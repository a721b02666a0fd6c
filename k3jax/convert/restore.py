"""Converted layers back on devices, on whatever mesh is wanted now."""

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from k3jax.byte_count import ByteCount
from k3jax.checkpoint import Checkpoint
from k3jax.config import K3Config
from k3jax.convert.layer_record import bytes_of_arrays, read_layer_record
from k3jax.convert.named_arrays import Weights, weights_of
from k3jax.convert.source import model_digests, shards_of
from k3jax.convert.storage import restore
from k3jax.convert.target import LAYER, TARGET, converted_layers, layer_folder, read_record
from k3jax.experts import RECIPES
from k3jax.mlp import GatedMLP, mlp_layout
from k3jax.moe import MoE, moe_layout
from k3jax.moe_arrays import MoEArrays
from k3jax.moe_shapes import AXES
from k3jax.options import DEFAULTS, LoadOptions
from pallas_kernels import KernelWeights, MXFP4Array, from_kernel_layout, lay_out
from sharding import Layout, partition_spec

MLP_AXES = {"gate_up": (None, "mlp_ff", "hidden"), "down": ("hidden", "mlp_ff")}


def restore_layers(
    path: str | Path,
    layers: Iterable[int],
    *,
    mesh: Mesh | None = None,
    recipe: str = "w4a16",
    implementation: str | None = None,
    tokens: str = "replicated",
    options: LoadOptions = DEFAULTS,
) -> list[GatedMLP | MoE]:
    """What `load_layers` does, from a folder that `k3jax convert` wrote.

    A kernel's layout that cannot run here, or not over this mesh, is taken apart again, exactly.

    Raises:
        FileNotFoundError: a layer was not converted.
        ValueError: the recipe keeps its experts otherwise; the checkpoint it was made from has changed; or a record or
            an array is damaged.
    """
    target = Path(path)
    record = read_record(target / TARGET)
    config = K3Config.from_dict(record["config"])
    if record["dense_weights"] != options.dense_weights:
        raise ValueError(
            f"{target} keeps dense weights in {record['dense_weights']}, and not as "
            f"dense_weights={options.dense_weights!r} asks; convert to another folder"
        )
    located = [(layer, _located(target, record, config, layer, recipe)) for layer in layers]
    sizes = [bytes_of_arrays(of_layer) for _, of_layer in located]
    count = ByteCount(sum(sizes), options.progress)
    moe = functools.partial(MoE, config, recipe=recipe, implementation=implementation)
    results = []
    for (layer, of_layer), size in zip(located, sizes, strict=True):
        folder = layer_folder(target, layer)
        made: Callable[..., GatedMLP | MoE]
        if not config.is_moe(layer):
            layout = mlp_layout(config.intermediate_size, mesh, tokens, options)
            with count.layer(layer, size):
                weights = read_weights(folder, of_layer, layout, MLP_AXES)
            made = functools.partial(GatedMLP, **weights, activation=config.activation)
        else:
            layout = moe_layout(config, recipe, mesh, tokens, options)
            with count.layer(layer, size):
                weights = read_weights(folder, of_layer, layout, AXES)
            splits_width = layout.sizes.tensor > 1  # of which each part is laid out by itself
            if of_layer["experts"] == "mosaic" and (splits_width or not _is_wanted(weights, recipe, implementation)):
                weights = {**weights, **_taken_apart(weights)}
            made = functools.partial(moe, arrays=MoEArrays(**weights))
        results.append(made(mesh=mesh, tokens=tokens, options=options))
    return results


def _located(target: Path, record: Mapping[str, Any], config: K3Config, layer: int, recipe: str) -> dict[str, Any]:
    """The layer's record, if it is there, sound, fresh and for this recipe."""
    is_moe, folder = config.is_moe(layer), layer_folder(target, layer)
    if not (folder / LAYER).exists():
        have = ", ".join(map(str, converted_layers(target))) or "none"
        raise FileNotFoundError(f"{target} has no layer {layer}; converted are {have}")
    of_layer = read_layer_record(target, record, config, layer)
    require_fresh(record, of_layer, layer, target)
    kept = of_layer["experts"]
    if is_moe and RECIPES[recipe].packed == (kept == "bf16"):
        raise ValueError(f"{folder} keeps its experts in {kept}, for another recipe than {recipe!r}")
    return of_layer


def read_weights(
    folder: Path, of_layer: Mapping[str, Any], layout: Layout, axes: Mapping[str, tuple[str | None, ...]]
) -> Weights:
    """The weights in a layer's folder, split over the layout's mesh."""
    shardings = {name: _sharding(name, layout, axes) for name in of_layer["arrays"]}
    return weights_of(restore(folder, of_layer["arrays"], shardings), of_layer["experts"])


def require_fresh(record: Mapping[str, Any], of_layer: Mapping[str, Any], layer: int, target: Path) -> None:
    """Raises ValueError if the checkpoint that a layer was made from is still there but is no longer what it was."""
    source = Path(record["source"])
    if not os.path.isdir(source):  # which also says so of what cannot be a path
        return
    checkpoint = Checkpoint.open(source)
    if model_digests(checkpoint) != record["model"] or shards_of(checkpoint.read_layer(layer)) != of_layer["shards"]:
        raise ValueError(
            f"{source} has changed since layer {layer} was converted to {target}; run k3jax convert again, which "
            "converts what has changed"
        )


def _sharding(name: str, layout: Layout, axes: Mapping[str, tuple[str | None, ...]]) -> jax.sharding.Sharding:
    if layout.mesh is None:
        return SingleDeviceSharding(jax.devices()[0])
    field, _, leaf = name.partition(".")
    spec = partition_spec(axes[field], layout.rules)
    if leaf in ("words", "exponents"):  # a kernel's layout can be split by experts only
        spec = PartitionSpec(spec[0])
    return NamedSharding(layout.mesh, spec)


def _is_wanted(weights: Weights, recipe: str, implementation: str | None) -> bool:
    """Whether a layer loaded here would have its experts in the same layout, or might have."""
    shapes = jax.eval_shape(_unpack, weights["w13"])
    try:
        laid_out = lay_out(shapes, recipe=recipe, gated=True, implementation=implementation)
    except NotImplementedError:  # which the layer will say better
        return False
    return isinstance(laid_out, KernelWeights) and laid_out.mma == weights["w13"].mma


def _taken_apart(weights: Weights) -> dict[str, MXFP4Array]:
    """w13 `[E, 2, F, L]` and w2 `[E, L, F]` as checkpoints have them."""
    w13, w2 = _unpack(weights["w13"]), _unpack(weights["w2"])
    split = functools.partial(jax.tree.map, lambda leaf: leaf.reshape(leaf.shape[0], 2, -1, leaf.shape[-1]))
    return {"w13": split(w13), "w2": w2}


@jax.jit
def _unpack(w: KernelWeights) -> MXFP4Array:
    return from_kernel_layout(w)
