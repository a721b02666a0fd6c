"""An MoE layer in plain `jax.numpy` that rounds nowhere: what the gradients of the layer are held to.

Every expert computes every token and the picks are weights of a dense sum, so that JAX differentiates it without any
rule of ours. It works in the dtype of its arrays: float32, or float64 where JAX has that enabled. For small layers.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax.config import K3Config
from pallas_kernels import Activation


def moe_output(
    weights: Mapping[str, Array], x: Float[Array, "t d"], config: K3Config, ids: Int[Array, "t x"]
) -> Float[Array, "t d"]:
    """`[T, D] -> [T, D]` for given picks, with `weights` called as the fields of `MoEArrays`, all in the dtype of `x`.

    A part that the layer lacks has no entry. Picks do not depend on anything here, so the router's correction bias,
    which does nothing but choose them, has no gradient: it is not even read.
    """
    expert_weights = _expert_weights(weights, x, config, ids)
    latent = x @ weights["latent_down"].T if "latent_down" in weights else x
    gate, up = jnp.einsum("tl,epfl->ptef", latent, weights["w13"])
    y = jnp.einsum("te,tef,elf->tl", expert_weights, config.activation(gate, up), weights["w2"])
    if "latent_norm" in weights:
        y = (
            weights["latent_norm"][None, :]
            * y
            * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + config.rms_norm_eps)
        )
    if "latent_up" in weights:
        y = y @ weights["latent_up"].T
    if "shared_gate_up" in weights:
        y = y + mlp_output(weights["shared_gate_up"], weights["shared_down"], x, config.activation)
    return y


def mlp_output(
    gate_up: Float[Array, "2 f d"], down: Float[Array, "d f"], x: Float[Array, "t d"], activation: Activation
) -> Float[Array, "t d"]:
    """The gated MLP of a dense layer and of the shared experts, `[T, D] -> [T, D]`."""
    gate, up = jnp.einsum("td,pfd->ptf", x, gate_up)
    return activation(gate, up) @ down.T


def _expert_weights(weights: Mapping[str, Array], x: Array, config: K3Config, ids: Array) -> Array:
    """The weight of each expert for each token, `[T, E]`; zero for those not picked, and for an id of -1."""
    logits = x @ weights["router_weight"].T
    scores = jax.nn.sigmoid(logits) if config.router_activation == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    num_experts = logits.shape[1]
    picked = jnp.sum(jax.nn.one_hot(ids, num_experts, dtype=x.dtype), axis=1)
    chosen = scores * picked
    if config.renormalize and config.experts_per_token > 1:
        chosen = chosen / (jnp.sum(chosen, axis=-1, keepdims=True) + 1e-20)
    return chosen * config.routed_scaling_factor
