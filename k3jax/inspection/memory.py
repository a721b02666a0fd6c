"""How many bytes of weights each device of a mesh holds, from a config alone. Activations are not counted."""

import dataclasses

from k3jax.config import K3Config
from pallas_kernels.e8m0 import BLOCK
from sharding.mesh import MeshSizes
from sharding.rules import local_shape

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


def model_memory(config: K3Config, sizes: MeshSizes, *, packed: bool) -> ModelMemory:
    """What each device of the mesh holds, with routed experts in MXFP4 (`packed`) or in bfloat16.

    Raises:
        ValueError: something cannot be split evenly over that mesh.
    """
    moe_layers = sum(config.is_moe(layer) for layer in range(config.num_hidden_layers))
    dense_layers = config.num_hidden_layers - moe_layers
    return ModelMemory(
        packed=packed,
        dense_layers=dense_layers,
        moe_layers=moe_layers,
        dense=dense_memory(config, sizes) if dense_layers else None,
        moe=moe_memory(config, sizes, packed=packed) if moe_layers else None,
    )


def dense_memory(config: K3Config, sizes: MeshSizes) -> LayerMemory:
    """One dense layer: gate, up and down projections `[I, D]` in bfloat16, split along I."""
    width, hidden = local_shape((config.intermediate_size, config.hidden_size), ("mlp_ff", "hidden"), sizes)
    return LayerMemory(dense=3 * width * hidden * _BF16)


def moe_memory(config: K3Config, sizes: MeshSizes, *, packed: bool) -> LayerMemory:
    """One MoE layer: w1, w2 and w3 of the device's experts, its slice of the shared experts, the rest whole."""
    num_experts, hidden, latent = config.num_experts, config.hidden_size, config.latent_size
    assert num_experts is not None, "the config has no experts"
    shape = (num_experts, config.expert_width, latent)
    experts, width, depth = local_shape(shape, ("expert", "expert_ff", "latent"), sizes)
    if packed and (width % BLOCK or depth % BLOCK):
        raise ValueError(
            f"an expert's width of {config.expert_width} split over tensor={sizes.tensor} leaves {width} a device, by "
            f"{depth} inputs; MXFP4 needs multiples of {BLOCK}"
        )
    elements = 3 * experts * width * depth
    projections = 2 * latent * hidden if config.routed_expert_hidden_size is not None else 0
    norm = latent if config.latent_moe_use_norm else 0
    shared = 0
    if config.num_shared_experts:
        (shared,) = local_shape((config.shared_intermediate_size,), ("shared_ff",), sizes)
    return LayerMemory(
        routed_experts=elements // 2 + elements // BLOCK if packed else elements * _BF16,
        shared_experts=3 * shared * hidden * _BF16,
        latent=(projections + norm) * _BF16,
        router=num_experts * (hidden * _BF16 + _F32),
    )
