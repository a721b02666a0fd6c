"""The router: which experts a token goes to, with which weights. float32 from the products to the weights.

logits  = x @ weight.T                          [T, E], on the full hidden x
scores  = sigmoid(logits) or softmax(logits)
ids     = the X best of scores + bias           the biased scores choose ...
weights = scores[ids]                           ... the unbiased ones weigh
weights = weights / (sum(weights) + 1e-20)      where the config renormalises and X > 1
weights = weights * routed_scaling_factor
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from k3jax.config import K3Config
from pallas_kernels import stable_top_k, top_k_weights

MASKED = -1  # the id of a slot that goes to no expert


class Routing(NamedTuple):
    """Where tokens go: expert `ids` int32 `[T, X]`, -1 for masked tokens, and their `weights` float32 `[T, X]`."""

    ids: Int[Array, "t x"]
    weights: Float[Array, "t x"]


class ExpertLoad(NamedTuple):
    """Rows that each expert (`[E]`) and each rank (`[ranks]`) computes; int32."""

    per_expert: Int[Array, " e"]
    per_rank: Int[Array, " ranks"]


class Router(nnx.Module):
    """`weight [E, D]` bfloat16 and the correction `bias [E]`, float32: in bfloat16 it would move picks."""

    def __init__(self, weight: Float[Array, "e d"], bias: Float[Array, " e"]) -> None:
        if weight.ndim != 2 or bias.shape != weight.shape[:1]:
            raise ValueError(f"Router: weight {weight.shape} must be [E, D] and bias {bias.shape} [E]")
        if weight.dtype != jnp.bfloat16 or bias.dtype != jnp.float32:
            raise ValueError(
                f"Router: weight is {weight.dtype} and bias {bias.dtype}; they must be bfloat16 and float32"
            )
        self.weight = nnx.Param(weight, axes=(None, "hidden"))
        self.bias = nnx.Param(bias, axes=(None,))

    def logits(self, x: Float[Array, "t d"]) -> Float[Array, "t e"]:
        """`x @ weight.T` with `x` as given: the products and sums in float32 for any input dtype."""
        weight = self.weight[...]
        if x.dtype != weight.dtype:
            x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
        return jnp.dot(x, weight.T, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST)


def pick_experts(
    logits: Float[Array, "t e"],
    bias: Float[Array, " e"],
    config: K3Config,
    mask: Bool[Array, " t"] | None = None,
) -> Routing:
    """The X experts of each token; equal scores go to the lowest id, tokens with a False mask to none."""
    scores = jax.nn.sigmoid(logits) if config.router_activation == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    if config.num_expert_group > config.topk_group:
        scores = _best_groups_only(scores, bias, config.num_expert_group, config.topk_group)
    picks = config.experts_per_token
    renormalize, scale = config.renormalize and picks > 1, float(config.routed_scaling_factor)
    ids, weights = top_k_weights(scores, bias, picks, renormalize=renormalize, scale=scale)
    if mask is not None:
        ids = jnp.where(mask[:, None], ids, MASKED)
        weights = jnp.where(mask[:, None], weights, 0.0)
    return Routing(ids, weights)


def expert_load(routing: Routing, num_experts: int, ranks: int = 1) -> ExpertLoad:
    """How many rows each expert computes, and each of `ranks` ranks that hold contiguous ranges of experts.

    Raises:
        ValueError: `ranks` does not divide `num_experts`.
    """
    if ranks < 1 or num_experts % ranks:
        raise ValueError(f"expert_load: {ranks=} must be positive and divide {num_experts=}")
    slots = jnp.where(routing.ids < 0, num_experts, routing.ids).reshape(-1)
    per_expert = jnp.bincount(slots, length=num_experts + 1)[:num_experts].astype(jnp.int32)
    return ExpertLoad(per_expert, per_expert.reshape(ranks, -1).sum(axis=1, dtype=jnp.int32))


def _best_groups_only(
    scores: Float[Array, "t e"], bias: Float[Array, " e"], num_groups: int, kept: int
) -> Float[Array, "t e"]:
    """Masks with -inf the scores outside each token's `kept` best groups.

    A group's own is the sum of its two best, as biased.
    """
    grouped = scores.reshape(scores.shape[0], num_groups, -1)
    choice = jax.lax.stop_gradient(grouped + bias.reshape(1, num_groups, -1))
    group_scores = jnp.sort(choice, axis=-1)[..., -2:].sum(axis=-1)
    best = stable_top_k(group_scores, kept)
    is_kept = jnp.any(best[:, :, None] == jnp.arange(num_groups)[None, None, :], axis=1)
    return jnp.where(is_kept[:, :, None], grouped, -jnp.inf).reshape(scores.shape)
