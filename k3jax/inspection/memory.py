"""How many bytes of weights each device of a mesh holds, from a config alone. Activations are not counted."""

import dataclasses
import math

from k3jax.config import K3Config
from k3jax.moe_arrays import local_shapes
from k3jax.options import DEFAULTS
from pallas_kernels.e8m0 import BLOCK
from sharding import AxisRules, MeshSizes, layout_rules, local_shape
from sharding.mlp_tp import mlp_tp

_BF16, _F32 = 2, 4
_REPLICATED = layout_rules("replicated")


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
    config: K3Config, sizes: MeshSizes, *, packed: bool, tokens: str = "replicated", split_shared: bool = False
) -> ModelMemory:
    """What each device of the mesh holds, with routed experts in MXFP4 (`packed`) or in bfloat16.

    `tokens` and `split_shared` are those of `load_layer`.

    Raises:
        ValueError: something cannot be split evenly over that mesh.
    """
    rules = layout_rules(tokens, split_shared)
    moe_layers = sum(config.is_moe(layer) for layer in range(config.num_hidden_layers))
    dense_layers = config.num_hidden_layers - moe_layers
    return ModelMemory(
        packed=packed,
        dense_layers=dense_layers,
        moe_layers=moe_layers,
        dense=dense_memory(config, sizes, rules) if dense_layers else None,
        moe=moe_memory(config, sizes, packed=packed, rules=rules) if moe_layers else None,
    )


def dense_memory(config: K3Config, sizes: MeshSizes, rules: AxisRules = _REPLICATED) -> LayerMemory:
    """One dense layer: gate, up and down projections `[I, D]` in bfloat16, split along I as far as it goes."""
    if rules == _REPLICATED:
        ranks = sizes.expert * sizes.tensor
        width = config.intermediate_size // mlp_tp(False, ranks, DEFAULTS.gpus_per_node, config.intermediate_size)
    else:
        (width,) = local_shape((config.intermediate_size,), ("mlp_ff",), sizes, rules)
    return LayerMemory(dense=3 * width * config.hidden_size * _BF16)


def moe_memory(config: K3Config, sizes: MeshSizes, *, packed: bool, rules: AxisRules = _REPLICATED) -> LayerMemory:
    """One MoE layer: w1, w2 and w3 of the device's experts, its share of the shared experts, the rest whole."""
    elements = {name: math.prod(shape) for name, shape in local_shapes(config, sizes, rules, packed=packed).items()}

    def total(prefix: str) -> int:
        return sum(count for name, count in elements.items() if name.startswith(prefix))

    experts = total("w")
    return LayerMemory(
        routed_experts=experts // 2 + experts // BLOCK if packed else experts * _BF16,
        shared_experts=total("shared") * _BF16,
        latent=total("latent") * _BF16,
        router=elements["router_weight"] * _BF16 + elements["router_bias"] * _F32,
    )
