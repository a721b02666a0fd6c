"""Small layers for tests, and the same weights under the checkpoint's names for the oracle."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax import K3Config, MoE, MoEArrays
from k3jax.experts import RECIPES
from k3jax.moe_shapes import array_shapes
from pallas_kernels import MXFP4Array, Situ

SMALL = K3Config(
    hidden_size=128,
    intermediate_size=160,
    num_hidden_layers=2,
    activation=Situ(4.0, 25.0),
    rms_norm_eps=1e-5,
    first_k_dense_replace=1,
    num_experts=16,
    num_experts_per_token=4,
    moe_intermediate_size=96,
    num_shared_experts=2,
    routed_expert_hidden_size=64,
    latent_moe_use_norm=True,
)


def small_config(**changes: Any) -> K3Config:
    """`SMALL` with fields replaced."""
    return dataclasses.replace(SMALL, **changes)


def random_arrays(config: K3Config, recipe: str, seed: int = 0) -> MoEArrays:
    """Random weights of variance 1 / fan-in, experts in MXFP4 as the recipe wants, and distinct correction biases.

    NumPy's: JAX would compile a generator for every shape.
    """
    rng = np.random.default_rng(seed)
    arrays: dict[str, Any] = {}
    for name, shape in array_shapes(config).items():
        if name in ("w13", "w2") and RECIPES[recipe].packed:
            arrays[name] = _random_experts(rng, shape)
        elif name == "latent_norm":
            arrays[name] = jnp.asarray(np.ones(shape, jnp.bfloat16))
        elif name == "router_bias":
            arrays[name] = jnp.asarray(0.05 * rng.standard_normal(shape, np.float32))
        else:
            weights = rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
            arrays[name] = jnp.asarray(weights.astype(jnp.bfloat16))
    return MoEArrays(**arrays)


def _random_experts(rng: np.random.Generator, shape: tuple[int, ...]) -> MXFP4Array:
    """All codes, whose mean square is 8.6, with scales over three octaves, which make it 15."""
    *rows, depth = shape
    exponent = -round(np.log2(15 * depth) / 2)
    codes = rng.integers(0, 256, (*rows, depth // 2), np.uint8)
    scales = rng.integers(126 + exponent, 129 + exponent, (*rows, depth // 32), np.uint8)
    return MXFP4Array(jnp.asarray(codes), jnp.asarray(scales))


def random_layer(config: K3Config, recipe: str, seed: int = 0) -> MoE:
    return MoE(config, recipe=recipe, arrays=random_arrays(config, recipe, seed))


def random_tokens(shape: tuple[int, ...], seed: int = 7, dtype: Any = "bfloat16") -> jax.Array:
    """Unit-normal values."""
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def checkpoint_tensors(arrays: MoEArrays) -> dict[str, np.ndarray]:
    """The arrays under the release's names, as the oracle takes them."""
    moe = "block_sparse_moe."
    tensors = {
        f"{moe}gate.weight": arrays.router_weight,
        f"{moe}gate.e_score_correction_bias": arrays.router_bias,
        f"{moe}routed_expert_down_proj.weight": arrays.latent_down,
        f"{moe}routed_expert_norm.weight": arrays.latent_norm,
        f"{moe}routed_expert_up_proj.weight": arrays.latent_up,
        f"{moe}shared_experts.down_proj.weight": arrays.shared_down,
    }
    found = {name: np.asarray(array) for name, array in tensors.items() if array is not None}
    if arrays.shared_gate_up is not None:
        gate, up = np.asarray(arrays.shared_gate_up)
        found |= {f"{moe}shared_experts.gate_proj.weight": gate, f"{moe}shared_experts.up_proj.weight": up}
    for e in range(arrays.w13.shape[0]):
        for suffix, w13, w2 in _leaves(arrays.w13, arrays.w2):
            w1, w3 = np.asarray(w13[e])
            for name, matrix in (("w1", w1), ("w3", w3), ("w2", np.asarray(w2[e]))):
                found[f"{moe}experts.{e}.{name}.{suffix}"] = matrix
    return found


def _leaves(w13: Any, w2: Any) -> list[tuple[str, np.ndarray, np.ndarray]]:
    if isinstance(w13, MXFP4Array):
        codes = ("weight_packed", np.asarray(w13.codes), np.asarray(w2.codes))
        return [codes, ("weight_scale", np.asarray(w13.scales), np.asarray(w2.scales))]
    return [("weight", np.asarray(w13), np.asarray(w2))]
