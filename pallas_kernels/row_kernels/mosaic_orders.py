"""Slots in the order of their groups, and the largest of each row, on Hopper and Blackwell, in Pallas's Mosaic GPU.

One launch each, which a CUDA graph can hold: of the few slots and scores of a decode step, what takes time is kernels
that wait for each other.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.row_kernels import pick_emitters, schedule_emitters
from pallas_kernels.row_kernels.emitters import THREADS
from pallas_kernels.row_kernels.mosaic_rows import block_kernel
from pallas_kernels.slot_order import RowSchedule

LONGEST_ROW = 1024  # of which each lane of a warp holds 32 columns, and 32 lanes one lane's
MOST_VALUES = 1 << 30  # twice as many are counted in 32 bits
MOST_COMPARISONS = 1 << 25  # of a slot and a group; of more, a sort takes less
_FEW_SLOTS = 2048  # four chunks of each of a warpgroup's warps; more slots are for four warpgroups


def why_not(op: str, x: Any, groups: int | None = None) -> str | None:
    """Why the kernel of `op` cannot take values or ids `x`, ids of so many groups; None if it can."""
    if op == "schedule_rows":
        if x.dtype != jnp.int32:
            return f"ids are {x.dtype}, and the kernel takes int32"
        if groups == 0:
            return "there is no group, and the kernel takes at least one"
        if x.size * ((groups or 0) + 1) > MOST_COMPARISONS:
            return f"{x.size} slots of {groups} groups are more than {MOST_COMPARISONS} comparisons of the two"
        return None
    if x.dtype != jnp.float32:
        return f"values are {x.dtype}, and the kernel takes float32"
    if x.shape[-1] > LONGEST_ROW:
        return f"rows of {x.shape[-1]} are longer than the {LONGEST_ROW} that a warp holds"
    if x.size > MOST_VALUES:
        return f"values has shape {x.shape}, more than {MOST_VALUES} elements"
    return None


def top_k(values: Float[Array, "t n"], k: int) -> Int[Array, "t k"]:
    """`top_k.stable_top_k`, for at least one value and pick."""
    rows, columns = values.shape
    emit = functools.partial(pick_emitters.largest, rows, columns, k)
    (places,) = _picking("stable_top_k", emit, values, k, jnp.int32)(values.reshape(-1))
    return places.reshape(rows, k)


def top_k_weights(
    scores: Float[Array, "t n"], bias: Float[Array, " n"], k: int, renormalize: bool, scale: float
) -> tuple[Int[Array, "t k"], Float[Array, "t k"]]:
    """`top_k.top_k_weights`, for at least one value and pick."""
    rows, columns = scores.shape
    emit = functools.partial(pick_emitters.weighted, rows, columns, k, renormalize, scale)
    kernel = _picking("top_k_weights", emit, scores, k, jnp.int32, jnp.float32)
    ids, weights = kernel(scores.reshape(-1), bias)
    return ids.reshape(rows, k), weights.reshape(rows, k)


def _picking(name: str, emit: Any, values: Array, k: int, *results: Any) -> Any:
    """A kernel of a warp a row of `values`, with so many results a row of each dtype."""
    rows, columns = values.shape
    out = tuple(jax.ShapeDtypeStruct((rows * k,), dtype) for dtype in results)
    blocks = -(-rows // (THREADS // 32))
    return block_kernel(name, emit, out, blocks, table_words=pick_emitters.table_words(columns))


def schedule_rows(ids: Int[Array, "t x"], groups: int) -> RowSchedule:
    """`slot_order.schedule_rows`, for at least one slot and group."""
    slots = ids.size
    warpgroups = 1 if slots <= _FEW_SLOTS else 4
    emit = functools.partial(schedule_emitters.scheduled, slots, ids.shape[1], groups, warpgroups * THREADS // 32)
    out = tuple(jax.ShapeDtypeStruct((size,), jnp.int32) for size in (slots, slots, groups))
    words = schedule_emitters.TABLE_WORDS
    kernel = block_kernel("schedule_rows", emit, out, groups + 1, warpgroups=warpgroups, table_words=words)
    token, row, sizes = kernel(ids.reshape(-1))
    return RowSchedule(token, row.reshape(ids.shape), sizes)
