"""What one block of the kernel that orders a few slots and writes their rows does, in PTX. Arrays are addresses.

A block is a slot's, or behind those of all slots a group's: each goes through all ids by itself. So no block waits for
another, nor for the order before it asks for its token; and no group's rows are one block's.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxlib.mlir import ir

from pallas_kernels.grouped_matmul.mosaic_parts.ptx import (
    Value,
    add,
    arith,
    both,
    constant,
    equal,
    i32,
    less,
    mul,
    ptx,
    ptx_if,
    right,
    scf,
)
from pallas_kernels.grouped_matmul.mosaic_parts.values import largest_magnitude
from pallas_kernels.row_kernels.emitters import (
    address,
    agreed,
    clamped,
    number,
    store_e4m3,
    store_mxfp8,
    store_token_scale,
    token_byte,
)
from pallas_kernels.row_kernels.move_emitters import vector_if
from pallas_kernels.row_kernels.schedule_emitters import CHUNK, bit, chunks_at_once, loaded_ids, of_warps

TABLE_WORDS = 3 * 32  # a word for each warp of a block: slots before, slots of the group, the largest magnitude


class Shape(NamedTuple):
    """What a launch is compiled for; `out_format` is "bf16", "mxfp8" or "fp8_token"."""

    slots: int
    picks: int
    groups: int
    vectors_a_row: int
    warps: int
    out_format: str


def spread(
    shape: Shape, block: Value, ids: Value, x: Value, token: Value, row: Value, sizes: Value, *rows_and_table: Value
) -> None:
    """A slot's row, its place in the order, its token and what it is of that; or a group's size.

    The vectors of the token, which the slot's number names, are on their way while the ids are counted. Rows of no
    group are not written.
    """
    *rows, table = rows_and_table
    own = ptx("mov.u32 $0, %tid.x;", out=i32())
    is_slot, slot = less(block, shape.slots), clamped(block, shape.slots)
    whose = arith.divui(slot, constant(shape.picks))
    columns = [add(own, start) for start in range(0, shape.vectors_a_row, 32 * shape.warps)]
    loaded = []
    for column in columns:
        wanted = arith.andi(is_slot, less(column, shape.vectors_a_row))
        loaded.append(vector_if(bit(wanted), x, add(mul(whose, shape.vectors_a_row), column)))
    past_slots = arith.subi(block, constant(shape.slots))
    group = arith.minui(arith.select(is_slot, number(ids, slot), past_slots), constant(shape.groups))
    place, size, magnitude = _over_block(shape, own, ids, slot, group, loaded, table)

    first = equal(own, 0)
    is_group = arith.andi(first, arith.cmpi(arith.CmpIPredicate.sge, past_slots, constant(0)))
    ptx_if(is_group, "st.global.b32 [$0], $1;", address(sizes, past_slots, 4), size)
    first = arith.andi(first, is_slot)
    has_row = less(group, shape.groups)
    ptx_if(first, "st.global.b32 [$0], $1;", address(token, place, 4), whose)
    ptx_if(first, "st.global.b32 [$0], $1;", address(row, slot, 4), arith.select(has_row, place, constant(-1)))
    branch = scf.IfOp(arith.andi(is_slot, has_row))
    with ir.InsertionPoint(branch.then_block):
        _store_row(shape, place, columns, loaded, magnitude, rows)
        scf.yield_([])


def _over_block(
    shape: Shape, own: Value, ids: Value, slot: Value, group: Value, loaded: Sequence[Sequence[Value]], table: Value
) -> tuple[Value, Value, Value]:
    """How many slots come before this one, how many are of its group, and the bits of the row's largest magnitude.

    Slots of no group are all of one more, and come in their order too. What is read past the end is of it as well, but
    after all slots.
    """
    lane, warp = both(own, 31), right(own, 5)
    rounds, at_once = chunks_at_once(shape.slots, shape.warps)
    assert rounds == 1, "few slots"
    before = held = constant(0)
    for chunk in range(at_once):
        start = add(mul(add(mul(warp, at_once), chunk), CHUNK), mul(lane, CHUNK // 32))
        for i, word in enumerate(loaded_ids(ids, start, shape.slots)):
            other = arith.minui(word, constant(shape.groups))
            is_held = equal(other, group)
            is_earlier = arith.ori(less(other, group), arith.andi(is_held, less(add(start, i), slot)))
            before, held = add(before, bit(is_earlier)), add(held, bit(is_held))
    counts = [agreed("add.u32", count) for count in (before, held)]
    if shape.out_format != "fp8_token":
        before, held = of_warps(counts, shape.warps, lane, warp, table)
        return agreed("add.u32", before), agreed("add.u32", held), constant(0)
    largest = agreed("max.u32", largest_magnitude([pair for pairs in loaded for pair in pairs]))
    before, held, largest = of_warps([*counts, largest], shape.warps, lane, warp, table)
    return agreed("add.u32", before), agreed("add.u32", held), agreed("max.u32", largest)


def _store_row(
    shape: Shape,
    row: Value,
    columns: Sequence[Value],
    loaded: Sequence[Sequence[Value]],
    magnitude: Value,
    rows: Sequence[Value],
) -> None:
    byte = token_byte(magnitude)
    for column, pairs in zip(columns, loaded, strict=True):
        inside = less(column, shape.vectors_a_row)
        vector = add(mul(row, shape.vectors_a_row), column)
        if shape.out_format == "bf16":
            ptx_if(inside, "st.global.v4.b32 [$0], {$1, $2, $3, $4};", address(rows[0], vector, 16), *pairs)
        elif shape.out_format == "mxfp8":
            store_mxfp8(inside, vector, pairs, *rows)
        else:
            store_e4m3(inside, vector, pairs, byte, rows[0])
    if shape.out_format == "fp8_token":
        store_token_scale(equal(columns[0], 0), row, byte, rows[1])
