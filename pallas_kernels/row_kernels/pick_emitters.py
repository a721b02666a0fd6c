"""What one block of the kernels that pick the largest of a row does, in PTX. Arrays are addresses, and so is a table.

Keys are integers, and the few scores are added in one order, so that no result depends on any order of work. All lanes
of a warp take the same way.
"""

import functools

from jaxlib.mlir import ir

from pallas_kernels.grouped_matmul.mosaic_parts.ptx import (
    Value,
    add,
    arith,
    both,
    constant,
    either,
    equal,
    f32,
    i32,
    left,
    less,
    load_shared_32,
    mul,
    ptx,
    ptx_if,
    right,
    thread,
    utils,
)
from pallas_kernels.row_kernels.emitters import THREADS, address, agreed, clamped, number, sum_of_lanes
from pallas_kernels.top_k import VANISHED

_LANES = 32
_STRIDE = _LANES + 1  # words of a layer in the table: lanes that read one column each then read different banks
_ABSENT, _NAN, _ZERO = 0, 1, 0x8000_0000  # keys: of what is taken or past the end, below every number, of both zeros


def layers_of(columns: int) -> int:
    """Columns that a lane holds."""
    return -(-columns // _LANES)


def table_words(columns: int) -> int:
    """Of the tables of a block's warps in `largest` and `weighted`."""
    return THREADS // _LANES * layers_of(columns) * _STRIDE


def largest(rows: int, columns: int, picks: int, block: Value, values: Value, places: Value, table: Value) -> None:
    """The places of a row's `picks` largest, a row a warp."""
    row, picked = _picked(rows, columns, picks, block, values, None, table)
    for pick, place in picked:
        _store_pick(rows, picks, row, pick, places, place)


def weighted(
    rows: int,
    columns: int,
    picks: int,
    renormalize: bool,
    scale: float,
    block: Value,
    scores: Value,
    bias: Value,
    places: Value,
    weights: Value,
    table: Value,
) -> None:
    """Likewise of scores and a bias, and those places' scores: over their sum if renormalised, and times the scale."""
    row, picked = _picked(rows, columns, picks, block, scores, bias, table)
    start = mul(clamped(row, rows), columns)
    own = [arith.bitcast(f32(), number(scores, add(start, place))) for _, place in picked]
    if renormalize:
        zero = arith.constant(f32(), 0.0)
        counted = [arith.select(less(pick, picks), score, zero) for (pick, _), score in zip(picked, own, strict=True)]
        total = arith.addf(sum_of_lanes(functools.reduce(arith.addf, counted)), arith.constant(f32(), VANISHED))
        own = [ptx("div.rn.f32 $0, $1, $2;", score, total, out=f32()) for score in own]
    for (pick, place), score in zip(picked, own, strict=True):
        weight = arith.mulf(score, arith.constant(f32(), scale))
        _store_pick(rows, picks, row, pick, places, place)
        _store_pick(rows, picks, row, pick, weights, arith.bitcast(i32(), weight))


def _picked(
    rows: int, columns: int, picks: int, block: Value, values: Value, bias: Value | None, table: Value
) -> tuple[Value, list[tuple[Value, Value]]]:
    """The warp's row, and which of its picks the lane holds: l, l + 32, ..., each with the place that was picked.

    A bias, where there is one, is added to the values, rounded once as by any device, before they are compared.
    Lane l holds the columns l, l + 32, ... and of them the largest and its place. The warp agrees on the largest of
    all; the holder's columns then lie across the lanes, in the table, and the warp agrees on the largest that is left.
    """
    own = thread()
    lane = both(own, 31)
    row = add(mul(block, THREADS // _LANES), right(own, 5))
    keys = _keys(columns, mul(clamped(row, rows), columns), lane, values, bias)
    layers = len(keys)
    table = add(table, mul(right(own, 5), 4 * layers * _STRIDE))
    best, place = _tabulated(keys, lane, table)
    # From here on a lane reads and writes one layer only, so that the warp need not wait for itself again.
    own_layer = add(table, mul(clamped(lane, layers), 4 * _STRIDE))
    own_picks = [add(lane, _LANES * i) for i in range(-(-picks // _LANES))]

    @utils.fori(arith.constant(ir.IndexType.get(), picks), (best, place, *(constant(0) for _ in own_picks)))
    def loop(i: Value, carry: tuple[Value, ...]) -> tuple[Value, ...]:
        best, place, *places = carry
        most = agreed("max.u32", best)
        taken = agreed("min.u32", arith.select(equal(best, most), place, constant(-1)))
        pick = arith.index_castui(i32(), i)
        places = [arith.select(equal(own, pick), taken, old) for own, old in zip(own_picks, places, strict=True)]
        holder, layer = both(taken, 31), right(taken, 5)
        word = add(own_layer, left(holder, 2))
        is_taken = equal(lane, layer)
        key = load_shared_32(word)
        ptx_if(is_taken, "st.shared.b32 [$0], $1;", word, constant(_ABSENT))
        key = arith.select(is_taken, constant(_ABSENT), arith.select(less(lane, layers), key, constant(_ABSENT)))
        most = agreed("max.u32", key)
        layer = agreed("min.u32", arith.select(equal(key, most), lane, constant(-1)))
        holds = equal(lane, holder)
        best, place = arith.select(holds, most, best), arith.select(holds, add(left(layer, 5), lane), place)
        return best, place, *places

    return row, list(zip(own_picks, loop.results[2:], strict=True))


def _tabulated(keys: list[Value], lane: Value, table: Value) -> tuple[Value, Value]:
    """The largest of the lane's keys and its column, after all of the warp's were written to the table."""
    best, place = keys[0], lane
    for layer, key in enumerate(keys):
        ptx("st.shared.b32 [$0], $1;", add(table, left(add(lane, layer * _STRIDE), 2)), key)
        if layer:
            above = arith.cmpi(arith.CmpIPredicate.ugt, key, best)  # and not equal ones: the first stays
            best, place = arith.select(above, key, best), arith.select(above, add(lane, 32 * layer), place)
    ptx("bar.warp.sync 0xffffffff;")
    return best, place


def _store_pick(rows: int, picks: int, row: Value, pick: Value, array: Value, word: Value) -> None:
    writes = arith.andi(less(row, rows), less(pick, picks))
    ptx_if(writes, "st.global.b32 [$0], $1;", address(array, add(mul(row, picks), pick), 4), word)


def _keys(columns: int, start: Value, lane: Value, values: Value, bias: Value | None) -> list[Value]:
    """Of the lane's columns of the row that starts at element `start`; all are asked for before the first is used."""
    places = [add(lane, _LANES * layer) for layer in range(layers_of(columns))]
    loaded = [number(values, add(start, clamped(place, columns))) for place in places]
    if bias is not None:
        added = [number(bias, clamped(place, columns)) for place in places]
        loaded = [_sum(value, other) for value, other in zip(loaded, added, strict=True)]
    keys = [_key(bits) for bits in loaded]
    return [arith.select(less(place, columns), key, constant(_ABSENT)) for place, key in zip(places, keys, strict=True)]


def _sum(a: Value, b: Value) -> Value:
    """Of two float32, on their bits."""
    return arith.bitcast(i32(), arith.addf(arith.bitcast(f32(), a), arith.bitcast(f32(), b)))


def _key(bits: Value) -> Value:
    """Of a float32's bits: unsigned integers in its order, zeros of both signs equal, NaN below every number."""
    magnitude = both(bits, 0x7FFF_FFFF)
    negative = arith.xori(bits, constant(-1))  # the larger the magnitude, the smaller
    key = arith.select(less(bits, 0), negative, either(bits, constant(0x8000_0000)))
    key = arith.select(equal(magnitude, 0), constant(_ZERO), key)
    return arith.select(less(constant(0x7F80_0000), magnitude), constant(_NAN), key)
