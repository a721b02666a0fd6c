"""`MoEArrays`: the weights of an MoE layer as arrays."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from k3jax.config import K3Config
from k3jax.experts import Weights
from k3jax.linear import Weight
from k3jax.mlp import random_weight
from k3jax.moe_shapes import AXES, FP8_NAMES, array_shapes
from pallas_kernels import FP8BlockArray, KernelWeights, MXFP4Array, quantize_mxfp4


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
