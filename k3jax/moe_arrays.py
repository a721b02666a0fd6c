"""`MoEArrays`: the weights of an MoE layer as arrays, with the shape and the logical axes of each."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from k3jax.config import K3Config
from k3jax.experts import Weights
from k3jax.linear import Weight
from k3jax.mlp import random_weight
from pallas_kernels import FP8BlockArray, KernelWeights, MXFP4Array, quantize_mxfp4
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEArrays:
    """An MoE layer's weights, (out, in) as checkpoints store them: bfloat16 but for the router's float32 bias.

    Latent projections and shared experts may be FP8BlockArrays instead.

    Attributes:
        router_weight: `[E, D]`. router_bias: float32 `[E]`.
        latent_down: `[L, D]`, latent_up: `[D, L]`: both, or None where experts work on D itself.
        latent_norm: `[L]`, or None.
        shared_gate_up: `[2, Fs, D]`, the gate first, shared_down: `[D, Fs]`: both, or None without shared experts.
        w13: `[E, 2, F, L]`, the gate (w1) first, and w2: `[E, L, F]`: MXFP4Array, or bfloat16 for recipe "bf16".
    """

    router_weight: Array
    router_bias: Array
    latent_down: Weight | None = None
    latent_norm: Array | None = None
    latent_up: Weight | None = None
    shared_gate_up: Weight | None = None
    shared_down: Weight | None = None
    w13: Weights
    w2: Weights

    @classmethod
    def random(cls, config: K3Config, *, packed: bool, rngs: nnx.Rngs) -> "MoEArrays":
        """Random weights of variance 1 / fan-in; experts in MXFP4 when `packed`."""
        constant = {"router_bias": (0, jnp.float32), "latent_norm": (1, jnp.bfloat16)}
        arrays = {
            name: jnp.full(shape, *constant[name]) if name in constant else random_weight(rngs, shape)
            for name, shape in array_shapes(config).items()
        }
        if packed:
            arrays |= {name: quantize_mxfp4(arrays[name]) for name in ("w13", "w2")}
        return cls(**arrays)

    @classmethod
    def abstract(cls, config: K3Config, *, packed: bool) -> "MoEArrays":
        """`jax.ShapeDtypeStruct`s for the arrays: enough to compile a layer, without its weights."""
        make = jax.eval_shape(lambda: vars(cls.random(config, packed=packed, rngs=nnx.Rngs(0))))
        return cls(**make)


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


def check_arrays(config: K3Config, arrays: MoEArrays, *, packed: bool) -> None:
    """Raises ValueError unless every array is there exactly when the config says so, in its shape and dtype."""
    expected = array_shapes(config)
    for name in AXES:
        array = getattr(arrays, name)
        shape = expected.get(name)
        if isinstance(array, KernelWeights) and name == "w13" and shape is not None:
            shape = (shape[0], 2 * shape[2], shape[3])
        found = None if array is None else tuple(array.shape)
        if found != shape:
            raise ValueError(f"MoE: {name} has shape {found}, but the config asks for {shape}")
        if isinstance(array, MXFP4Array | KernelWeights) or name == "router_bias" or array is None:
            continue
        if isinstance(array, FP8BlockArray) and name in FP8_NAMES:
            continue
        if array.dtype != jnp.bfloat16:
            raise ValueError(f"MoE: {name} must be bfloat16, not {array.dtype}")
    for name in ("w13", "w2"):
        if isinstance(getattr(arrays, name), MXFP4Array | KernelWeights) != packed:
            wanted = "an MXFP4Array" if packed else "a bfloat16 array (MXFP4Array.dequantize gives one)"
            raise ValueError(f"MoE: {name} must be {wanted} for this recipe")
