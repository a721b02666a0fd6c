"""A Triton kernel that sorts slots by their groups in one launch: each program finds the slots of its own groups.

A program counts the slots of the groups before its own, which is where its rows begin, and then goes through all slots
once more and numbers those of its groups. That is a comparison of every slot with every group, which for a few
thousand slots takes less than the launches of a sort. Integers throughout, and nothing is shared, so the result does
not depend on any order of work.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Int

from pallas_kernels.slot_order import RowSchedule
from pallas_kernels.triton_call import capability, jit, triton_call

MOST_SLOTS = 4096  # for more, the launches of a sort take less
_FEW_GROUPS = 256  # as many have a program each; of more, 8 share one, and with it the reading of all slots
_CHUNK = 2048  # slots and groups that a program compares at a time


def why_not(ids: Any) -> str | None:
    """Why the kernel cannot take `ids`; None if it can."""
    if ids.size > MOST_SLOTS:
        return f"ids has {ids.size} slots, and comparing each with every group is quick up to {MOST_SLOTS}"
    return None


@jit
def schedule(
    ids_ptr: tl.tensor,
    token_ptr: tl.tensor,
    row_ptr: tl.tensor,
    sizes_ptr: tl.tensor,
    SLOTS: tl.constexpr,
    PICKS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """The slots and the sizes of BLOCK groups. Slots without a group are those of one more, GROUPS, and come last."""
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    first = tl.zeros((BLOCK, 1), tl.int32)
    for start in range(0, SLOTS, CHUNK):
        group = _group(ids_ptr, start + tl.arange(0, CHUNK), SLOTS, GROUPS)
        first += tl.sum((group[None, :] < own).to(tl.int32), 1, keep_dims=True)
    row = first
    for start in range(0, SLOTS, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        group = _group(ids_ptr, slot, SLOTS, GROUPS)
        held = ((group[None, :] == own) & (slot < SLOTS)[None, :]).to(tl.int32)
        rows = row + tl.cumsum(held, 1) - held
        at = tl.sum(rows * held, 0)  # a slot has one group at most
        here = tl.sum(held, 0) > 0
        tl.store(row_ptr + slot, tl.where(group < GROUPS, at, -1), mask=here)
        tl.store(token_ptr + at, slot // PICKS, mask=here)
        row += tl.sum(held, 1, keep_dims=True)
    tl.store(sizes_ptr + own, row - first, mask=own < GROUPS)


@jit
def _group(ids_ptr: tl.tensor, slot: tl.tensor, SLOTS: tl.constexpr, GROUPS: tl.constexpr) -> tl.tensor:
    """The group of each slot; GROUPS for none."""
    group = tl.load(ids_ptr + slot, mask=slot < SLOTS, other=-1)
    return tl.where(group < 0, GROUPS, tl.minimum(group, GROUPS))


def schedule_rows(ids: Int[Array, "t x"], groups: int) -> RowSchedule:
    """`slot_order.schedule_rows`, for at least one slot."""
    slots = ids.size
    out = tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((slots,), ids.shape, (groups,)))
    block = 1 if groups <= _FEW_GROUPS else 8
    chunk = min(_CHUNK // block, max(32, 1 << (slots - 1).bit_length()))
    constants = {"SLOTS": slots, "PICKS": ids.shape[1], "GROUPS": groups, "BLOCK": block, "CHUNK": chunk}
    grid = (-(-(groups + 1) // block),)
    written = triton_call(
        schedule, ids, out=out, grid=grid, target=capability(), warps=4, stages=1, constants=constants
    )
    return RowSchedule(*written)
