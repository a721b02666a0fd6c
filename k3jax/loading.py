"""From a checkpoint folder to layers: `load_layer` and `load_layers`.

Every byte is read once and goes straight to the memory of the devices that hold it, or through a bounded part of the
host's (`layer_arrays.py`); packed experts stay packed unless the recipe is "bf16".
"""

import functools
from collections.abc import Callable, Iterable
from pathlib import Path

from jax.sharding import Mesh

from k3jax.byte_count import ByteCount
from k3jax.checkpoint import Checkpoint, LayerTensors
from k3jax.convert.restore import restore_layers
from k3jax.convert.target import is_converted
from k3jax.experts import RECIPES
from k3jax.layer_arrays import LayerArrays
from k3jax.mlp import GatedMLP, mlp_layout
from k3jax.moe import MoE, moe_layout
from k3jax.options import DEFAULTS, LoadOptions
from k3jax.stored_weights import log_rounding, require_storage
from pallas_kernels import lay_out
from sharding import Layout


def load_layer(
    path: str | Path,
    layer: int,
    *,
    mesh: Mesh | None = None,
    recipe: str = "w4a16",
    implementation: str | None = None,
    tokens: str = "replicated",
    options: LoadOptions = DEFAULTS,
) -> GatedMLP | MoE:
    """The MLP of 0-based `layer` of the checkpoint folder `path`: a GatedMLP for a dense layer, else an MoE.

    `path` may also be a folder that `k3jax convert` wrote.

    Over a `mesh` (`sharding.make_mesh`) experts are split along its axis `expert`, and their width along `tensor`. With
    `tokens="replicated"`, ranks along these two work on the same tokens; with "sharded", each along `expert` has its
    own. Groups of ranks along `data` have different tokens and nothing in common but a copy of the weights. Either way
    the layer takes and gives global arrays, of any number of tokens.

    Plain tensors stored in F16 or F32 are rounded to bfloat16, which one line of the "k3jax" logger tells; the router's
    bias stays float32.

    Raises:
        FileNotFoundError: the folder, its config, its index or a shard is missing.
        ValueError: the recipe or layer is unknown, the checkpoint is not what its config says (the message names the
            tensor), experts are plain where the recipe needs them packed, or the mesh cannot split the layer.
        NotImplementedError: the router is packed, or the implementation named cannot run here.
    """
    (loaded,) = load_layers(
        path,
        [layer],
        mesh=mesh,
        recipe=recipe,
        implementation=implementation,
        tokens=tokens,
        options=options,
    )
    return loaded


def load_layers(
    path: str | Path,
    layers: Iterable[int],
    *,
    mesh: Mesh | None = None,
    recipe: str = "w4a16",
    implementation: str | None = None,
    tokens: str = "replicated",
    options: LoadOptions = DEFAULTS,
) -> list[GatedMLP | MoE]:
    """The MLPs of several layers, as `load_layer` loads each; the index is read once.

    Every layer's tensors are checked before the first is read.

    Raises:
        What `load_layer` raises.
    """
    if recipe not in RECIPES:
        raise ValueError(f"{recipe=} is not one of {', '.join(RECIPES)}")
    if is_converted(path):
        return restore_layers(
            path,
            layers,
            mesh=mesh,
            recipe=recipe,
            implementation=implementation,
            tokens=tokens,
            options=options,
        )
    checkpoint = Checkpoint.open(path)
    config = checkpoint.config
    located: list[tuple[int, Layout, LayerTensors]] = []
    for layer in layers:
        if config.is_moe(layer):  # what a mesh cannot split is told before anything is read
            layout = moe_layout(config, recipe, mesh, tokens, options)
        else:
            layout = mlp_layout(config.intermediate_size, mesh, tokens, options)
        tensors = checkpoint.read_layer(layer)
        require_storage(tensors, recipe, options, checkpoint.path)
        located.append((layer, layout, tensors))
    count = ByteCount(sum(tensors.nbytes for _, _, tensors in located), options.progress)
    place = functools.partial(lay_out, recipe=recipe, implementation=implementation)
    place = functools.partial(place, allow_inexact=options.allow_inexact)
    moe = functools.partial(MoE, config, recipe=recipe, implementation=implementation)
    results = []
    for layer, layout, tensors in located:
        log_rounding(tensors, layer, checkpoint.path)
        made: Callable[..., GatedMLP | MoE]
        with count.layer(layer, tensors.nbytes) as progress:
            arrays = LayerArrays(tensors, layout, options, progress)
            if config.is_moe(layer):
                made = functools.partial(moe, arrays=arrays.moe(config, packed=RECIPES[recipe].packed, place=place))
            else:
                made = functools.partial(GatedMLP, *arrays.mlp("mlp.", "mlp_ff"), activation=config.activation)
        tensors.require_unchanged()
        results.append(made(mesh=mesh, tokens=tokens, options=options))
    return results
