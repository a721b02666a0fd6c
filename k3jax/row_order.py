"""Rows in the order of their experts: tokens spread out to rows, and rows added up to tokens.

Both have gradients of their own. JAX's would scatter: rows into tokens in an order that a GPU does not fix, and for
each slot once more into an array of all rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


class RowSchedule(NamedTuple):
    """Rows in expert order: `token[s]` reads row s, `row[t, k]` is where slot k of token t went, `group_sizes [E]`."""

    token: Int[Array, " s"]
    row: Int[Array, "t x"]
    group_sizes: Int[Array, " e"]


def schedule_rows(ids: Int[Array, "t x"], num_experts: int) -> RowSchedule:
    """Sorts the slots by expert, stably. Slots whose id is no expert (-1) come last and belong to no group."""
    num_tokens, slots = ids.shape
    expert = jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts).reshape(-1)
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    row = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
    group_sizes = jnp.bincount(expert, length=num_experts + 1)[:num_experts].astype(jnp.int32)
    return RowSchedule(order // slots, row.reshape(num_tokens, slots), group_sizes)


@jax.custom_vjp
def spread(tokens_TL: Float[Array, "t l"], schedule: RowSchedule) -> Float[Array, "s l"]:
    """Each row its token: `[T, L] -> [S, L]`. The gradient adds a token's rows up slot by slot, in float32."""
    return tokens_TL[schedule.token]


def _spread_forward(tokens_TL: Array, schedule: RowSchedule) -> tuple[Array, RowSchedule]:
    return spread(tokens_TL, schedule), schedule


def _spread_backward(schedule: RowSchedule, d_rows: Array) -> tuple[Array, RowSchedule]:
    ones = jnp.ones(schedule.row.shape, jnp.float32)
    return _sum_slots(d_rows, schedule, ones).astype(d_rows.dtype), _no_gradient(schedule)


spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def combine(rows_SL: Float[Array, "s l"], schedule: RowSchedule, weights: Float[Array, "t x"]) -> Float[Array, "t l"]:
    """The weighted sum of each token's rows, float32 `[T, L]`, added slot by slot so that the order is fixed."""
    return _sum_slots(rows_SL, schedule, weights)


def _combine_forward(rows_SL: Array, schedule: RowSchedule, weights: Array) -> tuple[Array, tuple[Any, ...]]:
    return combine(rows_SL, schedule, weights), (rows_SL, schedule, weights)


def _combine_backward(residuals: tuple[Any, ...], d_sums: Array) -> tuple[Array, RowSchedule, Array]:
    """A row gets its token's gradient times its weight, a weight the product of its row with that gradient."""
    rows_SL, schedule, weights = residuals
    num_routed = jnp.sum(schedule.group_sizes)
    num_rows = rows_SL.shape[0]
    of_row = jnp.zeros(num_rows, weights.dtype).at[schedule.row].set(weights, unique_indices=True)
    of_row = jnp.where(jnp.arange(num_rows) < num_routed, of_row, 0)
    d_rows = (of_row[:, None] * d_sums[schedule.token]).astype(rows_SL.dtype)

    def one_slot(row: Array) -> Array:
        dot = jnp.sum(rows_SL[row].astype(jnp.float32) * d_sums, axis=-1)
        return jnp.where(row < num_routed, dot, 0)

    d_weights = jax.lax.map(one_slot, schedule.row.T).T
    return d_rows, _no_gradient(schedule), d_weights


combine.defvjp(_combine_forward, _combine_backward)


def _sum_slots(rows_SL: Array, schedule: RowSchedule, weights: Array) -> Array:
    num_tokens, slots = schedule.row.shape
    num_routed = jnp.sum(schedule.group_sizes)

    def add_slot(k: Array, total_TL: Array) -> Array:
        row = schedule.row[:, k]
        # Rows past the last group are unspecified, NaN perhaps: select, never multiply by zero.
        product = rows_SL[row].astype(jnp.float32) * weights[:, k, None]
        return total_TL + jnp.where(row[:, None] < num_routed, product, 0.0)

    return jax.lax.fori_loop(0, slots, add_slot, jnp.zeros((num_tokens, rows_SL.shape[1]), jnp.float32))


def _no_gradient(schedule: RowSchedule) -> Any:
    """What a custom gradient gives for integers."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, jax.dtypes.float0), schedule)
