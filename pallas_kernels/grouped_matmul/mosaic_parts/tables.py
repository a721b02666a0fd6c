"""The schedule's tables in shared memory: a warp sums them up, and a warp searches them 32 entries at a time.

Table 0 holds for each group the number of the tile after its last, table 1 the row after its last; both are padded to
`table_words`, the first with numbers that no tile reaches.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_kernels.grouped_matmul.config import table_words
from pallas_kernels.grouped_matmul.mosaic_parts.decode import SCALAR
from pallas_kernels.grouped_matmul.mosaic_parts.geometry import Geometry
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
    mul,
    ptx,
    scalar,
    shared_address,
    thread,
    uniform,
    utils,
    wide,
    word,
)
from pallas_kernels.grouped_matmul.schedule import ROW_STEP, Prices

_PAST_END = 0x7FFF_FFFF

_FIND = """{
.reg .pred ends_beyond, any;
.reg .b32 end, lanes, at, first;
mov.b32 at, $2;
mov.b32 first, $3;
FIND_${:uid}:
ld.shared.b32 end, [at];
setp.lt.s32 ends_beyond, $1, end;
vote.sync.ballot.b32 lanes, ends_beyond, 0xffffffff;
setp.ne.b32 any, lanes, 0;
@any bra.uni FOUND_${:uid};
add.u32 at, at, 128;
add.u32 first, first, 32;
bra.uni FIND_${:uid};
FOUND_${:uid}:
brev.b32 lanes, lanes;
clz.b32 lanes, lanes;
add.u32 $0, first, lanes;
}"""


def _find(table: Value, tile: Value, group: Value) -> Value:
    """The first group from `group` on whose tiles end beyond `tile`; G if there is none. For a whole warp."""
    address = add(table, left(add(group, both(thread(), 31)), 2))
    return ptx(_FIND, tile, address, group, out=i32(), volatile=True)


def locate(shape: Geometry, table: Any, tile: Any, group: Any) -> tuple[Any, Any, Any, Any]:
    """(group, its first tile, first row and size) for a tile, searching from `group` on; group G: no such tile."""
    found = _found(table, tile, group)
    rows = table_words(shape.groups)
    before = jnp.maximum(found - 1, 0)
    first_tile, first_row = (jnp.where(found > 0, _entry(table, at + before), 0) for at in (0, rows))
    size = _entry(table, rows + found) - first_row
    return found, first_tile, first_row, size


def _entry(table: Any, index: Any) -> Any:
    """A table's entry; known to be the warp's, so that what depends on it stays in uniform registers."""

    @plgpu.inline_mgpu(arg_types=(SCALAR,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR))
    def emit(ctx: Any, value: Any) -> Any:
        del ctx
        return mgpu.FragmentedArray.splat(uniform(scalar(value)), (), is_signed=True)

    return emit(table[index])


def _found(table: Any, tile: Any, group: Any) -> Any:
    """The first group from `group` on whose tiles end beyond `tile`: 32 at a time, one a lane."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR),
    )
    def emit(ctx: Any, table: Value, tile: Any, group: Any) -> Any:
        del ctx
        found = _find(shared_address(table), scalar(tile), scalar(group))
        return mgpu.FragmentedArray.splat(uniform(found), (), is_signed=True)

    return emit(table, tile, group)


def build(shape: Geometry, sizes: Value, table: Value) -> None:
    """One warp: for each group the end of its tiles and, in the second table, the end of its rows."""
    words = table_words(shape.groups)
    lane = both(thread(), 31)
    rounds = arith.constant(ir.IndexType.get(), words // 32)

    @utils.fori(rounds, (constant(0), constant(0)))
    def _(i: Value, carry: tuple[Value, Value]) -> tuple[Value, Value]:
        group = add(left(arith.index_castui(i32(), i), 5), lane)
        inside = less(group, shape.groups)
        address = arith.addi(sizes, wide(left(arith.minsi(group, constant(shape.groups - 1)), 2)))
        rows = arith.select(inside, ptx("ld.global.b32 $0, [$1];", address, out=i32(), volatile=True), constant(0))
        tiles = mul(_quotient_up(rows, shape.tuning.widest), shape.column_blocks)
        if shape.launches:
            tiles = arith.select(equal(_cheapest(rows, shape.launches), shape.launch), tiles, constant(0))
        for distance in (1, 2, 4, 8, 16):
            rows, tiles = (add(v, _from_lower_lane(v, distance)) for v in (rows, tiles))
        tiles, rows = add(tiles, carry[0]), add(rows, carry[1])
        at = add(table, left(group, 2))
        ptx("st.shared.b32 [$0], $1;", at, arith.select(inside, tiles, constant(_PAST_END)))
        ptx("st.shared.b32 [$0], $1;", add(at, 4 * words), rows)
        last = "shfl.sync.idx.b32 $0, $1, 31, 31, 0xffffffff;"
        tiles, rows = (ptx(last, v, out=i32(), volatile=True) for v in (tiles, rows))
        return tiles, rows


def _quotient_up(a: Value, b: Value | int) -> Value:
    """`a / b`, rounded up."""
    return arith.divui(add(a, add(word(b), -1)), word(b))


def _group_cost(rows: Value, prices: Prices) -> Value:
    """`schedule.group_cost`."""
    widths, costs = prices
    tiles = _quotient_up(rows, widths[-1])
    share = _quotient_up(rows, arith.maxui(tiles, constant(1)))
    height = mul(_quotient_up(share, ROW_STEP), ROW_STEP)
    cost = constant(costs[-1])
    for width, narrower in zip(widths[-2::-1], costs[-2::-1], strict=True):
        cost = arith.select(less(height, width + 1), constant(narrower), cost)
    return mul(tiles, cost)


def _cheapest(rows: Value, launches: tuple[Prices, ...]) -> Value:
    """`schedule.cheapest`."""
    costs = [_group_cost(rows, prices) for prices in launches]
    best, index = costs[0], constant(0)
    for number, cost in enumerate(costs[1:], 1):
        index = arith.select(less(cost, best), constant(number), index)
        best = arith.minsi(cost, best)
    return index


def _from_lower_lane(value: Value, distance: int) -> Value:
    """The value of the lane `distance` lower, 0 where there is none."""
    code = "{ .reg .pred p; shfl.sync.up.b32 $0|p, $1, $2, 0, 0xffffffff; @!p mov.b32 $0, 0; }"
    return ptx(code, value, constant(distance), out=i32(), volatile=True)
