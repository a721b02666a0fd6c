"""The routed experts of all ranks: rows to the ranks of their experts, their work, and its sums back.

Where rows travel in the recipe's eight bits, the gradient is that of the same exchange in bfloat16: it goes straight
through the quantisers, at the rows that were not quantised, as on one device.
"""

import dataclasses
import functools
from typing import Any

import jax
from jaxtyping import Array, BFloat16, Float

from k3jax.experts import HowToMultiply, Mlp, Weights, routed_experts
from k3jax.routing import Routing


def exchange(
    latent_TL: BFloat16[Array, "t l"],
    routing: Routing,
    w13: Weights,
    w2: Weights,
    how: HowToMultiply,
    mlp: Mlp | None = None,
) -> Float[Array, "t l"]:
    """The experts' weighted sums, `[T, L]` in float32, for this rank's tokens; `w13` and `w2` are its own experts'.

    Where tokens are replicated, and where F is split, it is this rank's part of a sum over ranks (`ranks.total`). With
    an `mlp` of one's own in the place of `expert_mlp`, rows travel in bfloat16.
    """
    if mlp is None and how.ranks.encodes:
        return _encoded(latent_TL, routing.weights, routing.ids, w13, w2, how)
    return _exchange(latent_TL, routing.weights, routing.ids, w13, w2, _unencoded(how), mlp)


def _exchange(
    latent_TL: Array, weights: Array, ids: Array, w13: Weights, w2: Weights, how: HowToMultiply, mlp: Mlp | None
) -> Array:
    arrived = how.ranks.dispatch(latent_TL, ids, weights, w13.shape[0])
    sums = routed_experts(arrived.rows, Routing(arrived.ids, arrived.weights), w13, w2, how, mlp)
    return how.ranks.combine(sums, arrived)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _encoded(latent_TL: Array, weights: Array, ids: Array, w13: Weights, w2: Weights, how: HowToMultiply) -> Array:
    return _exchange(latent_TL, weights, ids, w13, w2, how, None)


def _forward(*arguments: Any) -> tuple[Array, tuple[Any, ...]]:
    return _encoded(*arguments), arguments[:5]


def _backward(how: HowToMultiply, residuals: tuple[Any, ...], d_sums: Array) -> tuple[Any, ...]:
    latent_TL, weights, ids, w13, w2 = residuals
    _, pullback = jax.vjp(
        lambda latent_TL, weights: _exchange(latent_TL, weights, ids, w13, w2, _unencoded(how), None),
        latent_TL,
        weights,
    )
    return *pullback(d_sums), None, None, None


_encoded.defvjp(_forward, _backward)


def _unencoded(how: HowToMultiply) -> HowToMultiply:
    return dataclasses.replace(how, ranks=how.ranks.unencoded())
