"""A layer of random weights made where it is used, for measurements at the release's sizes without a checkpoint."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from k3jax.config import K3Config
from k3jax.mlp import random_weight
from k3jax.moe import MoE, MoEArrays
from k3jax.moe_shapes import array_shapes
from pallas_kernels import MXFP4Array, Situ

_CODES_RMS = 2.93  # of E2M1 values when all codes are alike
_ROUTER_GAIN, _GATE_GAIN = 1.25, 1.5  # standard deviations of the logits, and of gate and up


def real_widths(num_experts: int, experts_per_token: int = 16) -> K3Config:
    """The release's layer with another number of experts."""
    return K3Config(
        hidden_size=7168,
        intermediate_size=33792,
        num_hidden_layers=2,
        activation=Situ(4.0, 25.0),
        rms_norm_eps=1e-5,
        first_k_dense_replace=1,
        num_experts=num_experts,
        num_experts_per_token=experts_per_token,
        moe_intermediate_size=3072,
        num_shared_experts=2,
        routed_expert_hidden_size=3584,
        latent_moe_use_norm=True,
        quantization="mxfp4",
    )


def synthetic_layer(config: K3Config, *, seed: int, recipe: str = "w4a16", implementation: str | None = None) -> MoE:
    """An MoE layer whose experts are all codes alike, scaled so that every stage has values of order one."""
    rngs = nnx.Rngs(seed)
    shapes = array_shapes(config)
    dense = {name: random_weight(rngs, shape) for name, shape in shapes.items() if name not in ("w13", "w2")}
    dense["router_weight"] = dense["router_weight"] * jnp.bfloat16(_ROUTER_GAIN)
    dense["router_bias"] = 0.01 * jax.random.normal(rngs.params(), shapes["router_bias"])
    if "latent_norm" in dense:
        dense["latent_norm"] = jnp.ones(shapes["latent_norm"], jnp.bfloat16)
    if "shared_gate_up" in dense:
        dense["shared_gate_up"] = dense["shared_gate_up"] * jnp.bfloat16(_GATE_GAIN)
    w13 = random_experts(rngs.params(), shapes["w13"], _GATE_GAIN)
    w2 = random_experts(rngs.params(), shapes["w2"], float(np.sqrt(config.experts_per_token)))
    arrays = MoEArrays(**dense, w13=w13, w2=w2)
    return MoE(config, recipe=recipe, implementation=implementation, arrays=arrays)


@functools.partial(jax.jit, static_argnames=("shape", "gain"))
def random_experts(key: jax.Array, shape: tuple[int, ...], gain: float) -> MXFP4Array:
    """MXFP4 of `shape` `[..., K]`: uniform codes, scales of three neighbouring powers of two, variance `gain^2 / K`."""
    codes_key, scales_key = jax.random.split(key)
    middle = 127 + round(float(np.log2(gain / np.sqrt(shape[-1]) / _CODES_RMS)))
    codes = jax.random.bits(codes_key, (*shape[:-1], shape[-1] // 2), jnp.uint8)
    scales = jax.random.randint(scales_key, (*shape[:-1], shape[-1] // 32), middle - 1, middle + 2, jnp.int32)
    return MXFP4Array(codes, scales.astype(jnp.uint8))
