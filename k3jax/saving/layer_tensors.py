"""A layer's weights under the checkpoint's names, copied from the device one tensor at a time."""

import functools
from collections.abc import Callable, Iterator

import numpy as np
from flax import nnx

from k3jax.checkpoint.tensor_table import EXPERTS, MOE, TensorSpec, layer_table
from k3jax.config import K3Config
from k3jax.kernel_placement import stored_expert
from k3jax.linear import FrozenWeight
from k3jax.mlp import GatedMLP
from k3jax.moe import MoE
from pallas_kernels import KernelWeights, MXFP4Array

Read = Callable[[], np.ndarray]


def is_packed(layer: MoE) -> bool:
    """Whether the layer holds its experts in MXFP4."""
    return isinstance(layer.w13.get_value(), MXFP4Array | KernelWeights)


def layer_tensors(layer: GatedMLP | MoE, config: K3Config, index: int) -> Iterator[tuple[str, TensorSpec, Read]]:
    """`(suffix, what it is, read)` of every tensor, in the release's order; `read()` copies it to the host.

    Packed experts come out byte for byte as they were read, from a kernel's layout too. The router's bias is float32,
    whatever else is unpacked bfloat16: the first dtype of each spec.
    """
    if any(isinstance(leaf, FrozenWeight) for _, leaf in nnx.iter_graph(layer)):
        raise NotImplementedError("a layer whose dense weights are e4m3 no longer has those of its checkpoint to save")
    if isinstance(layer, GatedMLP):
        for suffix, spec in layer_table(config, index, set()).specs.items():
            yield suffix, spec, functools.partial(_mlp_tensor, layer, suffix.removeprefix("mlp."))
        return
    stored = f"{EXPERTS}0.w1.weight" + "_packed" * is_packed(layer)
    for suffix, spec in layer_table(config, index, {stored}).specs.items():
        if suffix.startswith(EXPERTS):
            yield suffix, spec, functools.partial(_expert_tensor, layer, suffix.removeprefix(EXPERTS))
        else:
            yield suffix, spec, functools.partial(_dense_tensor, layer, suffix.removeprefix(MOE))


def _mlp_tensor(mlp: GatedMLP, name: str) -> np.ndarray:
    if name == "down_proj.weight":
        return np.asarray(mlp.down[...])
    return np.asarray(mlp.gate_up[("gate_proj.weight", "up_proj.weight").index(name)])


def _dense_tensor(layer: MoE, name: str) -> np.ndarray:
    if name.startswith("shared_experts."):
        assert layer.shared is not None
        return _mlp_tensor(layer.shared, name.removeprefix("shared_experts."))
    variable = {
        "gate.weight": layer.router.weight,
        "gate.e_score_correction_bias": layer.router.bias,
        "routed_expert_down_proj.weight": layer.latent_down,
        "routed_expert_norm.weight": layer.latent_norm,
        "routed_expert_up_proj.weight": layer.latent_up,
    }[name]
    assert variable is not None
    return np.asarray(variable[...])


def _expert_tensor(layer: MoE, name: str) -> np.ndarray:
    """`7.w1.weight_packed` and the like."""
    expert, part, kind = name.split(".")
    matrix = stored_expert((layer.w2 if part == "w2" else layer.w13).get_value(), int(expert))
    leaf = np.asarray(matrix if kind == "weight" else matrix.codes if kind == "weight_packed" else matrix.scales)
    return leaf if part == "w2" else leaf[("w1", "w3").index(part)]
