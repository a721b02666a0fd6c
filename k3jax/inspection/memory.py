"""How many bytes of weights each device of a mesh holds, from a config alone. Activations are not counted."""

import dataclasses
import math

from k3jax.config import K3Config
from k3jax.moe_shapes import local_shapes
from k3jax.options import DEFAULTS, LoadOptions
from pallas_kernels import fp8_block
from pallas_kernels.e8m0 import BLOCK
from sharding import MeshSizes, layout_rules, local_shape
from sharding.mlp_tp import mlp_tp

_BF16, _F32 = 2, 4


@dataclasses.dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer's weights on one device, by part; parts that the layer lacks are 0."""

    routed_experts: int = 0
    shared_experts: int = 0
    latent: int = 0
    router: int = 0
    dense: int = 0

    @property
    def total(self) -> int:
        """All parts."""
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class ModelMemory:
    """Bytes on one device: of one dense layer, of one MoE layer (None where the model has none), and of all layers."""

    packed: bool
    dense_layers: int
    moe_layers: int
    dense: LayerMemory | None
    moe: LayerMemory | None

    @property
    def total(self) -> int:
        """All layers of the model."""
        dense, moe = (0 if layer is None else layer.total for layer in (self.dense, self.moe))
        return self.dense_layers * dense + self.moe_layers * moe


def model_memory(
    config: K3Config, sizes: MeshSizes, *, packed: bool, tokens: str = "replicated", options: LoadOptions = DEFAULTS
) -> ModelMemory:
    """What each device of the mesh holds, with routed experts in MXFP4 (`packed`) or in bfloat16.

    `tokens` and `options` are those of `load_layer`.

    Raises:
        ValueError: something cannot be split evenly over that mesh.
    """
    moe_layers = sum(config.is_moe(layer) for layer in range(config.num_hidden_layers))
    dense_layers = config.num_hidden_layers - moe_layers
    return ModelMemory(
        packed=packed,
        dense_layers=dense_layers,
        moe_layers=moe_layers,
        dense=dense_memory(config, sizes, tokens=tokens, options=options) if dense_layers else None,
        moe=moe_memory(config, sizes, packed=packed, tokens=tokens, options=options) if moe_layers else None,
    )


def dense_memory(
    config: K3Config, sizes: MeshSizes, *, tokens: str = "replicated", options: LoadOptions = DEFAULTS
) -> LayerMemory:
    """One dense layer: gate, up and down projections `[I, D]`, split along I as far as it goes."""
    if tokens == "replicated":
        ranks = sizes.expert * sizes.tensor
        width = config.intermediate_size // mlp_tp(False, ranks, options.gpus_per_node, config.intermediate_size)
    else:
        rules = layout_rules(tokens, options.split_shared)
        (width,) = local_shape((config.intermediate_size,), ("mlp_ff",), sizes, rules)
    return LayerMemory(dense=3 * _dense_bytes((width, config.hidden_size), options))


def moe_memory(
    config: K3Config, sizes: MeshSizes, *, packed: bool, tokens: str = "replicated", options: LoadOptions = DEFAULTS
) -> LayerMemory:
    """One MoE layer: w1, w2 and w3 of the device's experts, its share of the shared experts, the rest whole."""
    shapes = local_shapes(config, sizes, layout_rules(tokens, options.split_shared), packed=packed)
    experts = sum(math.prod(shapes[name]) for name in ("w13", "w2"))

    def dense(*names: str) -> int:
        return sum(_dense_bytes(shapes[name], options) for name in names if name in shapes)

    return LayerMemory(
        routed_experts=experts // 2 + experts // BLOCK if packed else experts * _BF16,
        shared_experts=dense("shared_gate_up", "shared_down"),
        latent=dense("latent_down", "latent_up") + math.prod(shapes.get("latent_norm", (0,))) * _BF16,
        router=math.prod(shapes["router_weight"]) * _BF16 + math.prod(shapes["router_bias"]) * _F32,
    )


def _dense_bytes(shape: tuple[int, ...], options: LoadOptions) -> int:
    """Bytes of one of the weights that `dense_weights` is for, `[..., N, K]`."""
    if options.dense_weights == "bf16":
        return math.prod(shape) * _BF16
    *lead, rows, columns = shape
    return math.prod(lead) * (rows * columns + -(-rows // fp8_block.BLOCK) * -(-columns // fp8_block.BLOCK) * _F32)
