"""Rows in the order of their groups: where the row of each slot is, and whose each row is."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels import row_kernels, select


class RowSchedule(NamedTuple):
    """Rows sorted by group: `token[s]` reads row s, `row[t, k]` is where slot k of token t went, `group_sizes [G]`.

    `row` is -1 where the slot has no group.
    """

    token: Int[Array, " s"]
    row: Int[Array, "t x"]
    group_sizes: Int[Array, " g"]


@functools.partial(jax.jit, static_argnames=("groups", "implementation"))
def schedule_rows(ids: Int[Array, "t x"], groups: int, *, implementation: str | None = None) -> RowSchedule:
    """Sorts the slots by their group, `ids [T, X]`, stably: slots of a group stay in their order.

    Those whose id is none of `range(groups)` (-1) come last and belong to no group.

    Args:
        ids: int32. implementation: "reference", "xla" (a sort), "mosaic" (Hopper and Blackwell: one kernel that
            compares each slot with each group, 2^25 times at most), "triton" (NVIDIA GPUs from Ampere on: one kernel
            for 4,096 slots at most), or None for the fastest that can.

    Raises:
        ValueError: no such implementation exists.
        NotImplementedError: the named implementation cannot run this here.
    """
    chosen = select.choose("schedule_rows", implementation, x=ids, groups=groups)
    if chosen in row_kernels.IMPLEMENTATIONS and ids.size:
        kernel = row_kernels.orders("schedule_rows", chosen).schedule_rows
        return jax.custom_batching.sequential_vmap(lambda ids: kernel(ids, groups))(ids)
    group = jnp.where((ids >= 0) & (ids < groups), ids, groups).reshape(-1)
    row, slot = (_compared if chosen == "reference" else _sorted)(group, groups)
    sizes = jnp.bincount(group, length=groups + 1)[:groups].astype(jnp.int32)
    return RowSchedule(slot // ids.shape[1], row.reshape(ids.shape), sizes)


def _sorted(group: Array, groups: int) -> tuple[Array, Array]:
    """The row of each slot, -1 for those without a group, and the slot of each row."""
    number = jnp.arange(group.size, dtype=jnp.int32)
    in_order, slot = jax.lax.sort((group, number), num_keys=1, is_stable=True)
    named = jnp.where(in_order < groups, number, -1)
    return jnp.zeros_like(slot).at[slot].set(named, unique_indices=True), slot


def _compared(group: Array, groups: int) -> tuple[Array, Array]:
    """The same: a slot's row is the number of slots that come before it."""
    slot = jnp.arange(group.size, dtype=jnp.int32)
    mine, other = group[:, None], group[None, :]
    before = (other < mine) | ((other == mine) & (slot[None, :] < slot[:, None]))
    row = jnp.sum(before, axis=1, dtype=jnp.int32)
    of_row = jnp.sum(jnp.where(row[None, :] == slot[:, None], slot[None, :], 0), axis=1, dtype=jnp.int32)
    return jnp.where(group < groups, row, -1), of_row
