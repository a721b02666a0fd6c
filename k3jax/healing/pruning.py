"""Choosing which experts to keep, and the layer that has only those: pure functions, nothing is trained here."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from k3jax.experts import FrozenExperts
from k3jax.kernel_placement import stored_expert
from k3jax.moe import MoE, MoEArrays
from k3jax.options import DEFAULTS, LoadOptions
from k3jax.routing import Routing
from sharding import Layout

RULES = ("load", "weighted-load", "output-norm")


def expert_scores(
    layer: MoE, x: Float[Array, "t d"], mask: Bool[Array, " t"] | None = None, *, by: str
) -> Float[Array, " e"]:
    """How much the tokens `x [T, D]` use each expert, float32 `[E]`; add the scores of several batches up.

        load            rows                      sum over (t, k) with ids[t, k] = e of 1
        weighted-load   rows by their weights     ... of weights[t, k]
        output-norm     what they add             ... of weights[t, k] * |expert e's output for token t|

    Tokens whose `mask` is False count nothing.

    Raises:
        ValueError: there is no such rule.
    """
    if by not in RULES:
        raise ValueError(f"{by=} is not one of {', '.join(RULES)}")
    routing = layer.route(x, mask)
    if by == "load":
        each = jnp.ones_like(routing.weights)
    elif by == "weighted-load":
        each = routing.weights
    else:

        def norm(slot: Routing) -> Array:
            """Of one slot alone the layer's sum is that slot's weighted expert."""
            alone = Routing(slot.ids[:, None], slot.weights[:, None])
            return jnp.linalg.norm(layer.routed(x, alone, dtype=jnp.float32), axis=-1)

        each = jax.lax.map(norm, jax.tree.map(jnp.transpose, routing)).T
    num_experts = layer.router.bias.shape[0]
    bins = jnp.where(routing.ids < 0, num_experts, routing.ids)
    return jnp.zeros(num_experts + 1, jnp.float32).at[bins].add(each)[:num_experts]


def best_experts(scores: Float[np.ndarray, " e"], keep: int) -> Int[np.ndarray, " keep"]:
    """The ids of the `keep` largest scores, ascending; equal scores go to the lowest id.

    Raises:
        ValueError: `keep` is not between 1 and the number of experts, or a score is NaN.
    """
    values = np.asarray(scores, np.float64)
    if not 1 <= keep <= values.size:
        raise ValueError(f"{keep=} must be between 1 and the layer's {values.size} experts")
    if np.isnan(values).any():
        raise ValueError(f"expert {int(np.argmax(np.isnan(values)))} has a score of NaN: do the tokens hold one?")
    return np.sort(np.argsort(-values, kind="stable")[:keep])


def cut_experts(
    layer: MoE, ids: Int[np.ndarray, " keep"], *, tokens: str = "replicated", options: LoadOptions = DEFAULTS
) -> MoE:
    """`layer` with the experts `ids` only, numbered anew in that order: their bits, their router rows, their biases.

    Everything else is the same; tokens whose experts are gone go to the best of those that are left. A layer on a mesh
    is cut into one on the same mesh, with `tokens` and `options` as it was loaded with.

    Raises:
        ValueError: fewer experts are left than a token picks, an id is no expert or is named twice, or the mesh cannot
            share the experts that are left.
        NotImplementedError: the router chooses among groups of experts, which would become uneven, or the layer has
            adapters.
    """
    config = layer.config
    assert config.num_experts is not None
    if layer.adapters is not None:
        raise NotImplementedError("cutting experts that have adapters is not implemented: merge_adapters first")
    if config.num_expert_group > 1:
        raise NotImplementedError(f"cutting experts out of {config.num_expert_group} groups is not implemented")
    if len(ids) < config.experts_per_token:
        raise ValueError(f"{len(ids)} experts are left, but num_experts_per_token={config.experts_per_token}")
    if len(np.unique(ids)) < len(ids) or ids.min() < 0 or ids.max() >= config.num_experts:
        raise ValueError(f"the ids to keep must be different ones below {config.num_experts}, not {ids.tolist()}")
    arrays = MoEArrays(
        router_weight=layer.router.weight[...][ids],
        router_bias=layer.router.bias[...][ids],
        latent_down=_value(layer.latent_down),
        latent_norm=_value(layer.latent_norm),
        latent_up=_value(layer.latent_up),
        shared_gate_up=None if layer.shared is None else layer.shared.gate_up.get_value(),
        shared_down=None if layer.shared is None else layer.shared.down.get_value(),
        w13=_kept(layer.w13, ids, layer.layout),
        w2=_kept(layer.w2, ids, layer.layout),
    )
    return MoE(
        dataclasses.replace(config, num_experts=len(ids)),
        recipe=layer.recipe,
        implementation=layer.implementation,
        arrays=arrays,
        mesh=layer.layout.mesh,
        tokens=tokens,
        options=options,
    )


def _kept(experts: FrozenExperts, ids: Int[np.ndarray, " keep"], layout: Layout) -> Any:
    """The experts `ids`; those of a mesh as checkpoints have them, in the host's memory.

    Devices hold other experts after the cut than before it: through the host, none ever holds more than its part.
    """
    w = experts.get_value()
    if layout.mesh is None:
        return jax.tree.map(lambda leaf: leaf[ids], w)
    each = [jax.device_get(stored_expert(w, int(expert))) for expert in ids]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *each)


def _value(variable: nnx.Variable | None) -> Any:
    return None if variable is None else variable.get_value()
