"""What one thread of the kernels that move rows does, in PTX. Arrays are addresses; a vector is 16 bytes."""

from collections.abc import Sequence

from pallas_kernels.grouped_matmul.mosaic_parts.ptx import (
    Value,
    add,
    arith,
    constant,
    f32,
    i32,
    less,
    mul,
    ptx,
    ptx_if,
    wide,
)
from pallas_kernels.grouped_matmul.mosaic_parts.values import unpack
from pallas_kernels.row_kernels.emitters import address, clamped, number, own_vectors

_AT_ONCE = 16  # slots whose rows a thread asks for before it adds the first: 64 registers


def gathered(
    tokens: int, slots: int, vectors_a_row: int, words_a_row: int, block: Value, positions: Value, *arrays: Value
) -> None:
    """One vector of a token a thread, or one word of its scales: read once, and written to each of the token's rows.

    `arrays` are tokens, their scales if there are words of them, and the rows of each.
    """
    parts = vectors_a_row + words_a_row
    (part,) = own_vectors(block, 1)
    inside = less(part, tokens * parts)
    token, part = _divided(clamped(part, tokens * parts), parts)
    in_row = less(part, vectors_a_row)
    x, y = arrays[0], arrays[len(arrays) // 2]
    vector = vector_if(arith.extui(i32(), in_row), x, add(mul(token, vectors_a_row), part))
    in_scales = arith.cmpi(arith.CmpIPredicate.sge, part, constant(vectors_a_row))
    word = arith.maxsi(arith.subi(part, constant(vectors_a_row)), constant(0))
    scale = number(arrays[1], add(mul(token, words_a_row), word)) if words_a_row else None
    for slot in range(slots):
        place = number(positions, add(mul(token, slots), slot))
        wanted = arith.andi(inside, arith.cmpi(arith.CmpIPredicate.sge, place, constant(0)))
        row = arith.maxsi(place, constant(0))
        code = "st.global.v4.b32 [$0], {$1, $2, $3, $4};"
        ptx_if(arith.andi(wanted, in_row), code, _in_row(y, row, 16 * vectors_a_row, part, 16), *vector)
        if scale is not None:
            at = _in_row(arrays[3], row, 4 * words_a_row, word, 4)
            ptx_if(arith.andi(wanted, in_scales), "st.global.b32 [$0], $1;", at, scale)


def combined(
    tokens: int, slots: int, vectors_a_row: int, block: Value, rows: Value, positions: Value, weights: Value, y: Value
) -> None:
    """One vector of a token's sum a thread: its rows' products with their weights, slot after slot, in float32."""
    vectors = tokens * vectors_a_row
    (vector,) = own_vectors(block, 1)
    token, column = _divided(clamped(vector, vectors), vectors_a_row)
    first = mul(token, slots)
    zero = arith.constant(f32(), 0.0)
    sums: list[Value] = [zero] * 8
    for start in range(0, slots, _AT_ONCE):
        picks = [add(first, slot) for slot in range(start, min(start + _AT_ONCE, slots))]
        places = [number(positions, pick) for pick in picks]
        factors = [arith.bitcast(f32(), number(weights, pick)) for pick in picks]
        named = [arith.extui(i32(), arith.cmpi(arith.CmpIPredicate.sge, place, constant(0))) for place in places]
        loaded = [
            vector_if(is_named, rows, add(mul(place, vectors_a_row), column))
            for is_named, place in zip(named, places, strict=True)
        ]
        for place, factor, words in zip(places, factors, loaded, strict=True):
            weight = arith.select(less(place, 0), zero, factor)  # that of no row may be anything
            values = [value for word in words for value in unpack(word)]
            sums = [
                ptx("fma.rn.f32 $0, $1, $2, $3;", value, weight, total, out=f32())
                for value, total in zip(values, sums, strict=True)
            ]
    for half in range(2):
        words = [arith.bitcast(i32(), total) for total in sums[4 * half : 4 * half + 4]]
        at = address(y, add(mul(vector, 2), half), 16)
        ptx_if(less(vector, vectors), "st.global.v4.b32 [$0], {$1, $2, $3, $4};", at, *words)


def copied(vectors: int, block: Value, x: Value, earlier: Value, y: Value) -> None:
    """A vector a thread. `earlier` is there for the kernel to wait for."""
    del earlier
    (vector,) = own_vectors(block, 1)
    inside = less(vector, vectors)
    words = vector_if(arith.extui(i32(), inside), x, clamped(vector, vectors))
    ptx_if(inside, "st.global.v4.b32 [$0], {$1, $2, $3, $4};", address(y, vector, 16), *words)


def _divided(vector: Value, vectors_a_row: int) -> tuple[Value, Value]:
    """The row of a vector, and which of the row's it is."""
    row = arith.divui(vector, constant(vectors_a_row))
    return row, arith.subi(vector, mul(row, vectors_a_row))


def _in_row(array: Value, row: Value, row_bytes: int, index: Value, size: int) -> Value:
    """The address of element `index` of `size` bytes of a row; there may be more elements than 32 bits count."""
    start = arith.muli(wide(row), arith.constant(wide(row).type, row_bytes))
    return address(arith.addi(array, start), index, size)


def vector_if(condition: Value, array: Value, vector: Value) -> Sequence[Value]:
    """A vector, or zeros without reading where the condition is 0."""
    code = """{ .reg .pred wanted; .reg .b32 word<4>; setp.ne.b32 wanted, $5, 0;
mov.b32 word0, 0; mov.b32 word1, 0; mov.b32 word2, 0; mov.b32 word3, 0;
@wanted ld.global.nc.L1::no_allocate.v4.b32 {word0, word1, word2, word3}, [$4];
mov.b32 $0, word0; mov.b32 $1, word1; mov.b32 $2, word2; mov.b32 $3, word3; }"""
    return ptx(code, address(array, vector, 16), condition, out=[i32()] * 4, volatile=True)
