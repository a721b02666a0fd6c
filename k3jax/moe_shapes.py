"""The shape and the logical axes of each array of an MoE layer, of a config alone."""

from k3jax.config import K3Config
from pallas_kernels.e8m0 import BLOCK
from sharding import AxisRules, MeshSizes, local_shape

AXES = {
    "router_weight": (None, "hidden"),
    "router_bias": (None,),
    "latent_down": ("latent", "hidden"),
    "latent_norm": ("latent",),
    "latent_up": ("hidden", "latent"),
    "shared_gate_up": (None, "shared_ff", "hidden"),
    "shared_down": ("hidden", "shared_ff"),
    "w13": ("expert", None, "expert_ff", "latent"),
    "w2": ("expert", "latent", "expert_ff"),
}
"""The logical axes of each array's dimensions."""

FP8_NAMES = ("latent_down", "latent_up", "shared_gate_up", "shared_down")
"""The arrays that may be kept in e4m3: never the router."""


def array_shapes(config: K3Config) -> dict[str, tuple[int, ...]]:
    """The shape of each array that a layer of this config has."""
    hidden, latent, shared = config.hidden_size, config.latent_size, config.shared_intermediate_size
    num_experts, width = config.num_experts, config.expert_width
    assert num_experts is not None, "the config has no experts"
    shapes: dict[str, tuple[int, ...]] = {"router_weight": (num_experts, hidden), "router_bias": (num_experts,)}
    if config.routed_expert_hidden_size is not None:
        shapes |= {"latent_down": (latent, hidden), "latent_up": (hidden, latent)}
    if config.latent_moe_use_norm:
        shapes["latent_norm"] = (latent,)
    if shared:
        shapes |= {"shared_gate_up": (2, shared, hidden), "shared_down": (hidden, shared)}
    return shapes | {"w13": (num_experts, 2, width, latent), "w2": (num_experts, latent, width)}


def local_shapes(config: K3Config, sizes: MeshSizes, rules: AxisRules, *, packed: bool) -> dict[str, tuple[int, ...]]:
    """`array_shapes` on one device of a mesh, with experts in MXFP4 (`packed`) or in bfloat16.

    Raises:
        ValueError: something cannot be split evenly over that mesh.
    """
    whole = array_shapes(config)
    experts_first = ("w13", *(name for name in whole if name != "w13"))  # what is told where several do not fit
    shapes = {name: local_shape(whole[name], AXES[name], sizes, rules) for name in experts_first}
    *_, width, depth = shapes["w13"]
    if packed and (width % BLOCK or depth % BLOCK):
        raise ValueError(
            f"an expert's width of {config.expert_width} split over tensor={sizes.tensor} leaves {width} a device, by "
            f"{depth} inputs; MXFP4 needs multiples of {BLOCK}"
        )
    return shapes
