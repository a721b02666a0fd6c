"""What Humming leaves to its user, as Triton kernels: where each slot goes, and the weighted sum of a token's rows.

A slot is one pick of one token. The order of an expert's rows is of no account, so atomics give it. Up to `ONE_LAUNCH`
slots one program does it all, above that three launches do.
"""

from typing import Any

import torch
import triton
import triton.language as tl

ONE_LAUNCH = 4096
CHUNK = 1024  # slots of a program, above that
COLUMNS = 512  # of a program of the sum: 16 bytes a thread


@triton.jit
def _expert_of(ids_ptr: tl.tensor, slot: tl.tensor, slots: tl.tensor) -> tl.tensor:
    return tl.load(ids_ptr + slot, mask=slot < slots, other=0)


@triton.jit
def _begin(
    counts: tl.tensor,
    cursors_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    padded_ptr: tl.tensor,
    groups: tl.tensor,
    block: tl.tensor,
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Writes where experts' rows begin and, if padded to blocks, the expert of each block and the number of rows."""
    expert = tl.arange(0, GROUPS)
    blocks = (counts + block - 1) // block
    begins = tl.cumsum(blocks, 0) - blocks
    tl.store(cursors_ptr + expert, begins * block, mask=expert < groups)
    if PADDED:
        tl.store(padded_ptr, tl.sum(blocks, 0) * block)
        for index in range(tl.max(blocks, 0)):
            tl.store(experts_ptr + begins + index, expert, mask=index < blocks)
    else:
        tl.store(bounds_ptr + expert, begins, mask=expert <= groups)  # GROUPS is over `groups`


@triton.jit
def _place(
    expert: tl.tensor,
    slot: tl.tensor,
    slots: tl.tensor,
    cursors_ptr: tl.tensor,
    row_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    PADDED: tl.constexpr,
) -> None:
    """Writes the slot of each row, or the row of each slot."""
    real = slot < slots
    row = tl.atomic_add(cursors_ptr + expert, 1, mask=real, sem="relaxed")
    if PADDED:
        tl.store(slot_ptr + row, slot, mask=real)
    else:
        tl.store(row_ptr + slot, row, mask=real)


@triton.jit
def _schedule(
    ids_ptr: tl.tensor,
    cursors_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    padded_ptr: tl.tensor,
    row_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    slots: tl.tensor,
    groups: tl.tensor,
    block: tl.tensor,
    capacity: tl.tensor,
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """All of it, by one program."""
    slot = tl.arange(0, SLOTS)
    if PADDED:
        for first in range(0, capacity, SLOTS):
            tl.store(slot_ptr + first + slot, slots, mask=first + slot < capacity)
    expert = _expert_of(ids_ptr, slot, slots)
    counts = tl.histogram(expert, GROUPS, mask=slot < slots)
    _begin(counts, cursors_ptr, bounds_ptr, experts_ptr, padded_ptr, groups, block, GROUPS, PADDED)
    tl.debug_barrier()  # what one thread wrote, others now read
    _place(expert, slot, slots, cursors_ptr, row_ptr, slot_ptr, PADDED)


@triton.jit
def _count(
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    slots: tl.tensor,
    groups: tl.tensor,
    capacity: tl.tensor,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Adds a chunk's slots to those of each expert, and makes the program's part of the rows padding."""
    slot = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    counts = tl.histogram(_expert_of(ids_ptr, slot, slots), GROUPS, mask=slot < slots)
    expert = tl.arange(0, GROUPS)
    tl.atomic_add(counts_ptr + expert, counts, mask=(counts > 0) & (expert < groups), sem="relaxed")
    if PADDED:
        for first in range(0, capacity, tl.num_programs(0) * CHUNK):
            tl.store(slot_ptr + first + slot, slots, mask=first + slot < capacity)


@triton.jit
def _scan(
    counts_ptr: tl.tensor,
    cursors_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    padded_ptr: tl.tensor,
    groups: tl.tensor,
    block: tl.tensor,
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Leaves the counts zero, for the next call."""
    expert = tl.arange(0, GROUPS)
    counts = tl.load(counts_ptr + expert, mask=expert < groups, other=0)
    tl.store(counts_ptr + expert, 0, mask=expert < groups)
    _begin(counts, cursors_ptr, bounds_ptr, experts_ptr, padded_ptr, groups, block, GROUPS, PADDED)


@triton.jit
def _place_chunk(
    ids_ptr: tl.tensor,
    cursors_ptr: tl.tensor,
    row_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    slots: tl.tensor,
    CHUNK: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    slot = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    _place(_expert_of(ids_ptr, slot, slots), slot, slots, cursors_ptr, row_ptr, slot_ptr, PADDED)


class Schedule:
    """Where the slots of `ids [T, X]` go: a call of `fill` computes what the attributes hold. All are int32.

    With `block`, experts' rows begin at multiples of it:
        slot: of each row; `T * X` for padding. experts: of each block. padded: `[1]`, how many rows there are.

    Without it:
        row: `[T, X]`, of each slot. bounds: `[groups + 1]`, where each expert's rows begin, and their number.
    """

    def __init__(self, ids: Any, groups: int, block: int | None = None) -> None:
        self.ids, self.groups, self.block = ids, groups, block
        slots, step = ids.numel(), block or 1
        self.capacity = min(slots * step, slots + groups * (step - 1)) // step * step
        self.slot, self.experts = ids.new_empty(self.capacity), ids.new_empty(self.capacity // step)
        self.padded = ids.new_empty(1)
        self.row, self.bounds = torch.empty_like(ids), ids.new_empty(groups + 1)
        self._counts, self._cursors = ids.new_zeros(groups), ids.new_empty(groups)

    def fill(self) -> None:
        slots, sizes = self.ids.numel(), (self.groups, self.block or 1)
        begins = (self._cursors, self.bounds, self.experts, self.padded)
        places = (self.row, self.slot, slots)
        how = {"GROUPS": triton.next_power_of_2(self.groups + 1), "PADDED": self.block is not None}
        if slots <= ONE_LAUNCH:
            size = max(128, triton.next_power_of_2(slots))
            warps = max(4, min(32, size // 128))
            _schedule[(1,)](self.ids, *begins, *places, *sizes, self.capacity, SLOTS=size, num_warps=warps, **how)
            return
        grid = (triton.cdiv(slots, CHUNK),)
        _count[grid](self.ids, self._counts, self.slot, slots, self.groups, self.capacity, CHUNK=CHUNK, **how)
        _scan[(1,)](self._counts, *begins, *sizes, num_warps=8, **how)
        _place_chunk[grid](self.ids, self._cursors, *places, CHUNK=CHUNK, PADDED=how["PADDED"])


@triton.jit
def _combine(
    rows_ptr: tl.tensor,
    row_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    width: tl.tensor,
    PICKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SORTED: tl.constexpr,
) -> None:
    token = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for pick in tl.static_range(PICKS):
        slot = token * PICKS + pick
        row = tl.load(row_ptr + slot) if SORTED else slot
        value = tl.load(rows_ptr + row.to(tl.int64) * width + column, mask=inside, other=0)
        total += tl.load(weights_ptr + slot) * value.to(tl.float32)
    tl.store(sums_ptr + token.to(tl.int64) * width + column, total.to(tl.bfloat16), mask=inside)


def combine(rows: Any, row: Any, weights: Any, sums: Any, *, in_expert_order: bool) -> None:
    """Writes bfloat16 `sums [T, L]`: of each token's rows times `weights [T, X]`, in float32 and in the order of picks.

    `rows` are bfloat16 `[T * X, L]`: in the order of experts, `row [T, X]` says where, else in the order of slots.
    """
    tokens, width = sums.shape
    grid = (tokens, triton.cdiv(width, COLUMNS))
    how = {"PICKS": weights.shape[1], "COLUMNS": COLUMNS, "SORTED": in_expert_order}
    _combine[grid](rows, row, weights, sums, width, num_warps=2, **how)
