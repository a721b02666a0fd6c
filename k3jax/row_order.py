"""Rows in the order of their experts: where each slot's row is, and tokens spread out to rows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import combine_rows, gather_rows


class RowSchedule(NamedTuple):
    """Rows in expert order: `token[s]` reads row s, `row[t, k]` is where slot k of token t went, `group_sizes [E]`.

    `row` is -1 where the slot has no expert.
    """

    token: Int[Array, " s"]
    row: Int[Array, "t x"]
    group_sizes: Int[Array, " e"]


def schedule_rows(ids: Int[Array, "t x"], num_experts: int) -> RowSchedule:
    """Sorts the slots by expert, stably. Slots whose id is no expert (-1) come last and belong to no group."""
    num_tokens, slots = ids.shape
    expert = jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts).reshape(-1)
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    row = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
    row = jnp.where(expert < num_experts, row, -1)
    group_sizes = jnp.bincount(expert, length=num_experts + 1)[:num_experts].astype(jnp.int32)
    return RowSchedule(order // slots, row.reshape(num_tokens, slots), group_sizes)


@jax.custom_vjp
def spread(tokens_TL: Float[Array, "t l"], schedule: RowSchedule) -> Float[Array, "s l"]:
    """Each row its token: `[T, L] -> [S, L]`. The gradient adds a token's rows up slot by slot, in float32.

    JAX's own would scatter rows into tokens, in an order that a GPU does not fix.
    """
    return gather_rows(tokens_TL, schedule.token)


def _spread_forward(tokens_TL: Array, schedule: RowSchedule) -> tuple[Array, RowSchedule]:
    return spread(tokens_TL, schedule), schedule


def _spread_backward(schedule: RowSchedule, d_rows: Array) -> tuple[Array, RowSchedule]:
    ones = jnp.ones(schedule.row.shape, jnp.float32)
    d_tokens = combine_rows(d_rows, schedule.row, ones).astype(d_rows.dtype)
    return d_tokens, jax.tree.map(lambda leaf: np.zeros(leaf.shape, jax.dtypes.float0), schedule)


spread.defvjp(_spread_forward, _spread_backward)
