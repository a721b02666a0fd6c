"""What one block of the kernel that orders slots by their group does, in PTX. Arrays are addresses, and so is a table.

Integers throughout, compared within a warp or a block and never across blocks, so that no result depends on any order
of work. All lanes of a warp take the same way.
"""

from collections.abc import Sequence

from jaxlib.mlir import ir

from pallas_kernels.grouped_matmul.mosaic_parts.ptx import (
    Value,
    add,
    arith,
    both,
    constant,
    equal,
    i32,
    left,
    less,
    load_shared_32,
    mul,
    ptx,
    ptx_if,
    right,
    scf,
    utils,
)
from pallas_kernels.row_kernels.emitters import address, agreed, clamped

_LANES = 32
IDS = 4  # that a thread loads at once, 16 bytes
CHUNK = _LANES * IDS  # neighbouring slots, as a warp loads them
_MOST_CHUNKS = 8  # that a warp asks for before it looks at the first
TABLE_WORDS = 2 * _LANES  # two tables of a word for each warp of a block


def chunks_at_once(slots: int, warps: int) -> tuple[int, int]:
    """How often each of a block's warps loads how many chunks, so that together they load all slots."""
    chunks = -(-slots // (CHUNK * warps))
    rounds = -(-chunks // _MOST_CHUNKS)
    return rounds, -(-chunks // rounds)


def scheduled(
    slots: int,
    picks: int,
    groups: int,
    warps: int,
    block: Value,
    ids: Value,
    token: Value,
    row: Value,
    sizes: Value,
    table: Value,
) -> None:
    """The slots of one group, or in the last block of none: their rows, those rows' tokens, and the group's size.

    A warp walks through neighbouring slots twice: it counts, and, when the block knows where its rows begin, numbers.
    Ids are unsigned here, so that a negative one is none of a group's. So is what is read past the end: it comes after
    all slots, and of slots without a group the number is not told.
    """
    own = ptx("mov.u32 $0, %tid.x;", out=i32())
    lane, warp = both(own, 31), right(own, 5)
    rounds, at_once = chunks_at_once(slots, warps)
    start = add(mul(warp, rounds * at_once * CHUNK), left(lane, 2))

    def chunks(i: Value) -> list[tuple[Value, list[Value]]]:
        """Slots and ids of one round, all asked for before the first is used."""
        first = add(start, mul(arith.index_castui(i32(), i), at_once * CHUNK))
        own_slots = [add(first, CHUNK * chunk) for chunk in range(at_once)]
        return [(slot, loaded_ids(ids, slot, slots)) for slot in own_slots]

    bound = arith.constant(ir.IndexType.get(), rounds)
    only = chunks(arith.constant(ir.IndexType.get(), 0)) if rounds == 1 else None  # which registers keep

    @utils.fori(bound, (constant(0), constant(0)))
    def counted(i: Value, carry: tuple[Value, Value]) -> tuple[Value, Value]:
        below, held = carry
        for _, words in only or chunks(i):
            for word in words:
                below = add(below, bit(arith.cmpi(arith.CmpIPredicate.ult, word, block)))
                held = add(held, bit(_is_of(word, block, groups)))
        return below, held

    below, held = counted.results
    first_row, count = _over_block(below, held, warps, lane, warp, table)
    ptx_if(arith.andi(equal(own, 0), less(block, groups)), "st.global.b32 [$0], $1;", address(sizes, block, 4), count)
    is_group = less(block, groups)

    @utils.fori(bound, (first_row,))
    def _(i: Value, carry: tuple[Value]) -> tuple[Value]:
        (next_row,) = carry
        for slot, words in only or chunks(i):
            are_held = [_is_of(word, block, groups) for word in words]
            next_row = _numbered(slot, are_held, slots, picks, is_group, next_row, token, row)
        return (next_row,)


def _over_block(below: Value, held: Value, warps: int, lane: Value, warp: Value, table: Value) -> tuple[Value, Value]:
    """The warp's first row, and the number of the block's, from what each thread counted."""
    below, held = of_warps([agreed("add.u32", value) for value in (below, held)], warps, lane, warp, table)
    earlier = arith.select(less(lane, warp), held, constant(0))
    below, count, before = (agreed("add.u32", value) for value in (below, held, earlier))
    return add(below, before), count


def of_warps(values: Sequence[Value], warps: int, lane: Value, warp: Value, table: Value) -> list[Value]:
    """What each warp of the block has, `values` of its own, in the lane of its number; 0 in lanes beyond.

    Each value's table has a word a lane.
    """
    first, other = equal(lane, 0), clamped(lane, warps)
    for i, value in enumerate(values):
        ptx_if(first, "st.shared.b32 [$0], $1;", add(table, add(left(warp, 2), 4 * _LANES * i)), value)
    ptx("bar.sync 0;")
    words = [load_shared_32(add(table, add(left(other, 2), 4 * _LANES * i))) for i in range(len(values))]
    return [arith.select(less(lane, warps), word, constant(0)) for word in words]


def _numbered(
    slot: Value,
    are_held: list[Value],
    slots: int,
    picks: int,
    is_group: Value,
    next_row: Value,
    token: Value,
    row: Value,
) -> Value:
    """Writes what is to be written of a chunk, and gives the row after its last. Most chunks have nothing to write."""
    any_held = arith.ori(arith.ori(are_held[0], are_held[1]), arith.ori(are_held[2], are_held[3]))
    branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ne, _ballot(any_held), constant(0)), [i32()], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        lower = ptx("mov.u32 $0, %lanemask_lt;", out=i32())
        at = next_row
        for ballot in [_ballot(is_held) for is_held in are_held]:
            at = add(at, ptx("popc.b32 $0, $1;", both(ballot, lower), out=i32()))
        for i, is_held in enumerate(are_held):
            own_slot = add(slot, i)
            writes = arith.andi(is_held, less(own_slot, slots))
            named = arith.select(is_group, at, constant(-1))
            ptx_if(writes, "st.global.b32 [$0], $1;", address(row, own_slot, 4), named)
            whose = arith.divui(own_slot, constant(picks))
            ptx_if(writes, "st.global.b32 [$0], $1;", address(token, at, 4), whose)
            at = add(at, bit(is_held))
        last = ptx("shfl.sync.idx.b32 $0, $1, 31, 31, 0xffffffff;", at, out=i32(), volatile=True)
        scf.YieldOp([last])
    with ir.InsertionPoint(branch.else_block):
        scf.YieldOp([next_row])
    return branch.results[0]


def loaded_ids(ids: Value, slot: Value, slots: int) -> list[Value]:
    """Those of a slot, a multiple of 4, and of the next three; -1 for slots past the end, which are not read."""
    whole, rest = slots - slots % IDS, range(slots % IDS)
    load = "ld.global.nc"
    code = f"""{{ .reg .pred here; .reg .b32 word<{IDS}>;
{" ".join(f"mov.b32 word{i}, -1;" for i in range(IDS))}
setp.lt.s32 here, $5, {whole};
@here {load}.v4.b32 {{word0, word1, word2, word3}}, [$4];
{f"setp.eq.s32 here, $5, {whole};" if rest else ""}
{" ".join(f"@here {load}.b32 word{i}, [$4+{4 * i}];" for i in rest)}
{" ".join(f"mov.b32 ${i}, word{i};" for i in range(IDS))} }}"""
    return list(ptx(code, address(ids, slot, 4), slot, out=[i32()] * IDS, volatile=True))


def _is_of(word: Value, block: Value, groups: int) -> Value:
    """Whether the block's group is this id's; ids of no group are of one more."""
    return equal(arith.minui(word, constant(groups)), block)


def bit(condition: Value) -> Value:
    return arith.extui(i32(), condition)


def _ballot(condition: Value) -> Value:
    """A bit of each lane."""
    code = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
    return ptx(code, bit(condition), out=i32(), volatile=True)
