"""From a checkpoint folder to a layer: `load_layer`.

Routed experts are copied once, expert by expert, from the file into one stack each for w13 and w2;
packed ones stay packed unless the recipe is "bf16". Whatever has to be converted is converted one matrix at a time, so
the peak is the layer's own size and a little.
"""

import functools
import logging
import math
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from k3jax.checkpoint import Checkpoint, LayerTensors
from k3jax.checkpoint.tensor_table import EXPERTS, MOE
from k3jax.config import K3Config
from k3jax.experts import RECIPES, Weights
from k3jax.mlp import GatedMLP, mlp_layout
from k3jax.moe import MoE, moe_layout
from k3jax.moe_arrays import MoEArrays
from k3jax.options import DEFAULTS, LoadOptions
from k3jax.stored_weights import BF16, bf16_weight, mxfp4_weight
from pallas_kernels import MXFP4Array

_ALIGNMENT = 64  # JAX's CPU backend takes NumPy memory of this alignment over instead of copying it.
_log = logging.getLogger("k3jax")

_Read = Callable[[str], tuple[np.ndarray, ...]]


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
    if recipe not in RECIPES:
        raise ValueError(f"{recipe=} is not one of {', '.join(RECIPES)}")
    checkpoint = Checkpoint.open(path)
    config = checkpoint.config
    is_moe = config.is_moe(layer)
    if is_moe:  # what a mesh cannot split is told before anything is read
        moe_layout(config, recipe, mesh, tokens, options)
    else:
        mlp_layout(config.intermediate_size, mesh, tokens, options)
    tensors = checkpoint.read_layer(layer)
    _require_storage(tensors, recipe, options, checkpoint.path)
    _log_rounding(tensors, layer, checkpoint.path)
    if not is_moe:
        gate_up, down = _mlp(tensors, "mlp.")
        tensors.require_unchanged()
        return GatedMLP(gate_up, down, activation=config.activation, mesh=mesh, tokens=tokens, options=options)
    arrays = _moe_arrays(config, tensors, recipe)
    tensors.require_unchanged()
    return MoE(
        config,
        recipe=recipe,
        implementation=implementation,
        arrays=arrays,
        mesh=mesh,
        tokens=tokens,
        options=options,
    )


def _require_storage(tensors: LayerTensors, recipe: str, options: LoadOptions, path: Path) -> None:
    stems = (stem for stem, stored in tensors.stored.items() if stem.startswith(EXPERTS) and stored != "mxfp4")
    other = next(stems, None)
    if other is not None and RECIPES[recipe].packed and not options.quantize_plain:
        how = "in NVFP4" if tensors.stored[other] == "nvfp4" else f"plain, in {tensors.dtype(f'{other}.weight')}"
        raise ValueError(
            f"{path}: {other}.weight is stored {how}, and {recipe=} needs experts in MXFP4; "
            'load with recipe="bf16", or pass LoadOptions(quantize_plain=True) to quantise them now'
        )


def _log_rounding(tensors: LayerTensors, layer: int, path: Path) -> None:
    plain = [tensors.dtype(f"{stem}.weight") for stem, stored in tensors.stored.items() if stored == "plain"]
    rounded = [str(dtype) for dtype in plain if dtype != BF16]
    rounded += ["NVFP4" for stored in tensors.stored.values() if stored == "nvfp4"]
    if rounded:
        names = " and ".join(sorted(set(rounded)))
        _log.warning("%s: layer %d: %d tensors stored as %s are rounded to bfloat16", path, layer, len(rounded), names)


def _moe_arrays(config: K3Config, tensors: LayerTensors, recipe: str) -> MoEArrays:
    def weight(name: str) -> jax.Array | None:
        return jnp.array(bf16_weight(tensors, f"{MOE}{name}")) if f"{MOE}{name}" in tensors.stored else None

    norm = tensors.get(f"{MOE}routed_expert_norm.weight")
    router = weight("gate")
    assert router is not None
    assert config.num_experts is not None
    shared_gate_up, shared_down = _mlp(tensors, f"{MOE}shared_experts.") if config.num_shared_experts else (None, None)
    return MoEArrays(
        router_weight=router,
        router_bias=jnp.array(tensors[f"{MOE}gate.e_score_correction_bias"]),
        latent_down=weight("routed_expert_down_proj"),
        latent_norm=None if norm is None else jnp.array(norm.astype(BF16)),
        latent_up=weight("routed_expert_up_proj"),
        shared_gate_up=shared_gate_up,
        shared_down=shared_down,
        w13=_experts(tensors, config.num_experts, ("w1", "w3"), recipe),
        w2=_experts(tensors, config.num_experts, ("w2",), recipe),
    )


def _mlp(tensors: LayerTensors, prefix: str) -> tuple[jax.Array, jax.Array]:
    """`gate_up [2, F, D]`, the gate first, and `down [D, F]`."""
    gate = bf16_weight(tensors, f"{prefix}gate_proj")
    gate_up = _aligned((2, *gate.shape), BF16)
    gate_up[0], gate_up[1] = gate, bf16_weight(tensors, f"{prefix}up_proj")
    return jax.device_put(gate_up), jnp.array(bf16_weight(tensors, f"{prefix}down_proj"))


def _experts(tensors: LayerTensors, num_experts: int, parts: tuple[str, ...], recipe: str) -> Weights:
    """`[E, parts, N, K]` of all experts, without the axis where there is one part, as `recipe` needs them."""
    if RECIPES[recipe].packed:
        read = functools.partial(mxfp4_weight, tensors)
        return MXFP4Array(*_stacked(num_experts, parts, read, np.dtype(np.uint8)))
    (weights,) = _stacked(num_experts, parts, lambda stem: (bf16_weight(tensors, stem),), BF16)
    return weights


def _stacked(num_experts: int, parts: tuple[str, ...], read: _Read, dtype: np.dtype) -> list[jax.Array]:
    """For each array that `read(stem)` gives: all experts' stacked to `[E, parts, rows, columns]`, or without parts."""
    stacks: list[np.ndarray] = []
    for expert in range(num_experts):
        for index, part in enumerate(parts):
            arrays = read(f"{EXPERTS}{expert}.{part}")
            if not stacks:
                stacks = [_aligned((num_experts, len(parts), *array.shape), dtype) for array in arrays]
            for stack, array in zip(stacks, arrays, strict=True):
                stack[expert, index] = array
    return [jax.device_put(stack if len(parts) > 1 else stack[:, 0]) for stack in stacks]


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """`np.empty(shape, dtype)` that the CPU backend can take over: gigabytes of experts are not held twice."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + size].view(dtype).reshape(shape)
