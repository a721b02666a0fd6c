"""A Triton kernel that sorts slots by their groups in one launch: a slot's row is the number of slots before it.

That is a comparison of every slot with every other, which for a decode step's few, and for a few thousand, takes less
than the launches of a sort would. Integers throughout, so the result does not depend on the order of anything.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Int

from pallas_kernels.slot_order import RowSchedule
from pallas_kernels.triton_call import capability, jit, triton_call

MOST_SLOTS = 16384
_BLOCK = 32  # slots, or groups, of a program
_CHUNK = 512  # slots that it compares them with at a time


def why_not(ids: Any) -> str | None:
    """Why the kernel cannot take `ids`; None if it can."""
    if ids.size > MOST_SLOTS:
        return f"ids has {ids.size} slots, and comparing each with every other is quick up to {MOST_SLOTS}"
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
    """The rows of BLOCK slots or, in the programs after those, the sizes of BLOCK groups."""
    blocks: tl.constexpr = (SLOTS + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    count = tl.zeros((BLOCK,), tl.int32)
    if program < blocks:
        slot = program * BLOCK + tl.arange(0, BLOCK)
        group = _group(ids_ptr, slot, SLOTS, GROUPS)
        key = group * SLOTS + slot
        for start in range(0, SLOTS, CHUNK):
            other = start + tl.arange(0, CHUNK)
            # Slots past the end come after all others.
            before = (_group(ids_ptr, other, SLOTS, GROUPS) * SLOTS + other)[None, :] < key[:, None]
            count += tl.sum(before.to(tl.int32), 1)
        tl.store(row_ptr + slot, tl.where(group < GROUPS, count, -1), mask=slot < SLOTS)
        tl.store(token_ptr + count, slot // PICKS, mask=slot < SLOTS)
    else:
        group = (program - blocks) * BLOCK + tl.arange(0, BLOCK)
        for start in range(0, SLOTS, CHUNK):
            other = start + tl.arange(0, CHUNK)
            own = _group(ids_ptr, other, SLOTS, GROUPS)[None, :] == group[:, None]
            count += tl.sum(own.to(tl.int32), 1)
        tl.store(sizes_ptr + group, count, mask=group < GROUPS)


@jit
def _group(ids_ptr: tl.tensor, slot: tl.tensor, SLOTS: tl.constexpr, GROUPS: tl.constexpr) -> tl.tensor:
    """The group of each slot; GROUPS for none."""
    group = tl.load(ids_ptr + slot, mask=slot < SLOTS, other=-1)
    return tl.where(group < 0, GROUPS, tl.minimum(group, GROUPS))


def schedule_rows(ids: Int[Array, "t x"], groups: int) -> RowSchedule:
    """`slot_order.schedule_rows`, for at least one slot."""
    slots = ids.size
    out = tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((slots,), ids.shape, (groups,)))
    constants = {"SLOTS": slots, "PICKS": ids.shape[1], "GROUPS": groups, "BLOCK": _BLOCK, "CHUNK": _CHUNK}
    grid = (-(-slots // _BLOCK) + -(-groups // _BLOCK),)
    written = triton_call(
        schedule, ids, out=out, grid=grid, target=capability(), warps=4, stages=1, constants=constants
    )
    return RowSchedule(*written)
