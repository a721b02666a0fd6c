"""The loss of layer-wise distillation: relative errors of a block's output and of its normed latent, and balance."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from k3jax.mlp import GatedMLP
from k3jax.moe import MoE


@dataclass(frozen=True)
class LossWeights:
    """loss = output * (relative L2 of the output)^2 + latent * (that of the normed latent)^2 + balance * imbalance."""

    output: float = 1.0
    latent: float = 0.1
    balance: float = 0.0


@dataclass(frozen=True)
class Power:
    """The mean squared norm of the teacher's outputs and of its normed latents, over all tokens to train on.

    Errors are divided by these and not by a batch's own, so that the losses of micro-batches add up to the batch's.
    """

    output: float
    normed_latent: float | None


def distillation_loss(
    layer: GatedMLP | MoE,
    batch: dict[str, Array],
    power: Power,
    weights: LossWeights,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The loss over the tokens of `batch`, and its parts by name, all float32 means over the tokens that count.

    `batch` has `x [T, D]`, `output [T, D]` and, with a latent to match, `normed_latent [T, L]`; with `mask` bool `[T]`,
    tokens that are False are routed nowhere, count nothing and get no gradient, whatever they hold, NaN too.
    """
    mask = batch.get("mask")
    x = batch["x"] if mask is None else jnp.where(mask[:, None], batch["x"], 0)
    trace = layer.trace(x, mask)
    parts = {"output": _squared_error(trace["output"], batch["output"], mask) / power.output}
    loss = weights.output * parts["output"]
    if power.normed_latent is not None and weights.latent:
        parts["latent"] = _squared_error(trace["normed_latent"], batch["normed_latent"], mask) / power.normed_latent
        loss += weights.latent * parts["latent"]
    if weights.balance and isinstance(layer, MoE):
        parts["imbalance"] = imbalance(trace["router_logits"], trace["expert_ids"], mask)
        loss += weights.balance * parts["imbalance"]
    return loss, parts


def imbalance(logits: Float[Array, "t e"], ids: Array, mask: Bool[Array, " t"] | None = None) -> Float[Array, ""]:
    """`E * sum_e share_e * score_e - 1`: 0 where all experts are used alike, E - 1 where one does everything.

    share_e is the share of rows that expert e computes, a constant to the gradient; score_e the mean over tokens of its
    sigmoid score, normalised to add up to 1 over experts. The gradient lowers the scores of busy experts.
    """
    num_experts = logits.shape[1]
    scores = jax.nn.sigmoid(logits)
    scores = scores / jnp.sum(scores, axis=-1, keepdims=True)
    rows = jnp.sum(jax.nn.one_hot(ids, num_experts, dtype=jnp.float32), axis=(0, 1))
    share = jax.lax.stop_gradient(rows / jnp.maximum(jnp.sum(rows), 1))
    return num_experts * jnp.sum(share * _mean(scores, mask)) - 1


def _squared_error(ours: Array, theirs: Array, mask: Array | None) -> Array:
    """The mean over tokens of `|ours - theirs|^2`."""
    difference = ours.astype(jnp.float32) - theirs.astype(jnp.float32)
    if mask is not None:
        difference = jnp.where(mask[:, None], difference, 0)
    return jnp.sum(_mean(jnp.square(difference), mask))


def _mean(values: Array, mask: Array | None) -> Array:
    """Over tokens, of those that count; zero where none does."""
    if mask is None:
        return jnp.mean(values, axis=0)
    return jnp.sum(jnp.where(mask[:, None], values, 0), axis=0) / jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1)
