"""What one block of each row kernel does, in PTX. Arrays are addresses; a vector is 8 bfloat16, 16 bytes.

A thread whose vector or row lies beyond the end reads the last one again, so that its warp stays together, and stores
nothing.
"""

import functools
from collections.abc import Sequence

from pallas_kernels.e8m0 import BLOCK
from pallas_kernels.grouped_matmul.mosaic_parts.ptx import (
    Value,
    add,
    arith,
    both,
    constant,
    equal,
    f32,
    i32,
    left,
    less,
    mul,
    ptx,
    ptx_if,
    right,
    thread,
    wide,
)
from pallas_kernels.grouped_matmul.mosaic_parts.values import (
    activate_precisely,
    decode_e4m3,
    encode_e4m3,
    largest_magnitude,
    largest_of_lanes,
    pack,
    scale_byte,
    unpack,
)
from pallas_kernels.situ import Activation

THREADS = 128
VECTOR = 8
_LANES = BLOCK // VECTOR  # that hold 32 columns


def gated(
    activation: Activation, vectors: int, vectors_a_row: int, each: int, block: Value, x: Value, y: Value
) -> None:
    """`each` vectors of the activation a thread, of as many of gate and of up."""
    loaded = []
    for vector in own_vectors(block, each):
        at = clamped(vector, vectors)
        gate = add(at, mul(arith.divui(at, constant(vectors_a_row)), vectors_a_row))
        loaded.append((vector, _load(x, gate), _load(x, add(gate, vectors_a_row))))
    for vector, gates, ups in loaded:
        pairs = []
        for gate, up in zip(gates, ups, strict=True):
            halves = zip(unpack(gate), unpack(up), strict=True)
            pairs.append(pack(*(activate_precisely(activation, g, u) for g, u in halves)))
        code = "st.global.v4.b32 [$0], {$1, $2, $3, $4};"
        ptx_if(less(vector, vectors), code, address(y, vector, 16), *pairs)


def mxfp8(vectors: int, each: int, block: Value, x: Value, values: Value, scales: Value) -> None:
    """`each` vectors a thread; four neighbouring lanes hold the 32 columns of a scale."""
    loaded = [(vector, _load(x, clamped(vector, vectors))) for vector in own_vectors(block, each)]
    for vector, pairs in loaded:
        store_mxfp8(less(vector, vectors), vector, pairs, values, scales)


def dequantized_mxfp8(vectors: int, each: int, block: Value, values: Value, scales: Value, y: Value) -> None:
    """`each` vectors of bfloat16 a thread, of 8 bytes and their scale's."""
    loaded = []
    for vector in own_vectors(block, each):
        at = clamped(vector, vectors)
        code = "ld.global.nc.L1::no_allocate.v2.b32 {$0, $1}, [$2];"
        words = ptx(code, address(values, at, VECTOR), out=[i32()] * 2, volatile=True)
        scale = address(scales, right(at, _LANES.bit_length() - 1), 1)
        loaded.append((vector, words, ptx("ld.global.nc.u8 $0, [$1];", scale, out=i32(), volatile=True)))
    for vector, words, byte in loaded:
        pairs = [pair for word in words for pair in decode_e4m3(word, byte)]
        code = "st.global.v4.b32 [$0], {$1, $2, $3, $4};"
        ptx_if(less(vector, vectors), code, address(y, vector, 16), *pairs)


def fp8_token(rows: int, vectors_a_row: int, block: Value, x: Value, values: Value, scales: Value) -> None:
    """A row a warp, which keeps it in registers until its largest magnitude is known."""
    row, start, columns = _row_of_warp(rows, vectors_a_row, block)
    inside = less(row, rows)
    loaded = [_load(x, add(start, clamped(column, vectors_a_row))) for column in columns]
    byte = token_byte(largest_of_lanes(largest_magnitude([pair for pairs in loaded for pair in pairs]), 32))
    for column, pairs in zip(columns, loaded, strict=True):
        held = arith.andi(inside, less(column, vectors_a_row))
        store_e4m3(held, add(start, column), pairs, byte, values)
    store_token_scale(arith.andi(inside, equal(columns[0], 0)), row, byte, scales)


def normalized(rows: int, vectors_a_row: int, eps: float, block: Value, x: Value, gains: Value, y: Value) -> None:
    """A row of float32 a warp, which keeps it in registers as bfloat16 until the sum of its squares is known."""
    row, start, columns = _row_of_warp(rows, vectors_a_row, block)
    at = [clamped(column, vectors_a_row) for column in columns]
    first = [mul(add(start, column), 2) for column in at]  # of two vectors of 4 float32
    words = [(*_load(x, vector), *_load(x, add(vector, 1))) for vector in first]
    weights = [_load(gains, column) for column in at]
    numbers = [[arith.bitcast(f32(), word) for word in eight] for eight in words]
    loaded = [[pack(*eight[i : i + 2]) for i in range(0, VECTOR, 2)] for eight in numbers]
    total = zero = arith.constant(f32(), 0.0)
    for column, pairs in zip(columns, loaded, strict=True):
        squares = functools.reduce(arith.addf, [arith.mulf(v, v) for pair in pairs for v in unpack(pair)])
        total = arith.addf(total, arith.select(less(column, vectors_a_row), squares, zero))
    mean = arith.mulf(sum_of_lanes(total), arith.constant(f32(), 1 / (vectors_a_row * VECTOR)))
    factor = ptx("rsqrt.approx.f32 $0, $1;", arith.addf(mean, arith.constant(f32(), eps)), out=f32())
    for column, pairs, gain in zip(columns, loaded, weights, strict=True):
        normed = [pack(*(arith.mulf(value, factor) for value in unpack(pair))) for pair in pairs]
        products = [
            pack(*(arith.mulf(a, b) for a, b in zip(unpack(pair), unpack(other), strict=True)))
            for pair, other in zip(normed, gain, strict=True)
        ]
        held = arith.andi(less(row, rows), less(column, vectors_a_row))
        ptx_if(held, "st.global.v4.b32 [$0], {$1, $2, $3, $4};", address(y, add(start, column), 16), *products)


def _row_of_warp(rows: int, vectors_a_row: int, block: Value) -> tuple[Value, Value, list[Value]]:
    """The row of the thread's warp, its first vector, and which of its vectors the lane has: l, l + 32, ..."""
    own = thread()
    row = add(mul(block, THREADS // 32), right(own, 5))
    columns = [add(both(own, 31), 32 * i) for i in range(-(-vectors_a_row // 32))]
    return row, mul(clamped(row, rows), vectors_a_row), columns


def own_vectors(block: Value, each: int) -> list[Value]:
    """The thread's vectors: neighbouring threads have neighbouring ones."""
    first = add(mul(block, THREADS * each), thread())
    return [add(first, THREADS * i) for i in range(each)]


def clamped(index: Value, count: int) -> Value:
    return arith.minsi(index, constant(count - 1))


def _load(x: Value, vector: Value) -> Sequence[Value]:
    code = "ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];"
    return ptx(code, address(x, vector, 16), out=[i32()] * 4, volatile=True)


def store_mxfp8(condition: Value, vector: Value, pairs: Sequence[Value], values: Value, scales: Value) -> None:
    """A vector, of whose 32 columns the other three are with the lanes around, and by the first of the four a scale."""
    byte = scale_byte(largest_of_lanes(largest_magnitude(pairs), _LANES))
    store_e4m3(condition, vector, pairs, byte, values)
    first = arith.andi(condition, equal(both(vector, _LANES - 1), 0))
    ptx_if(first, "st.global.u8 [$0], $1;", address(scales, right(vector, _LANES.bit_length() - 1), 1), byte)


def token_byte(magnitude: Value) -> Value:
    """That of a token's scale, from the bits of its largest magnitude."""
    return arith.maxsi(scale_byte(magnitude), constant(1))  # a subnormal scale would be flushed when used


def store_token_scale(condition: Value, row: Value, byte: Value, scales: Value) -> None:
    scale = arith.select(less(byte, 255), left(byte, 23), constant(0x7FC00000))
    ptx_if(condition, "st.global.b32 [$0], $1;", address(scales, row, 4), scale)


def store_e4m3(condition: Value, vector: Value, pairs: Sequence[Value], byte: Value, values: Value) -> None:
    words = encode_e4m3(pairs, byte)
    ptx_if(condition, "st.global.v2.b32 [$0], {$1, $2};", address(values, vector, VECTOR), *words)


def address(base: Value, index: Value, size: int) -> Value:
    """Of element `index` of `size` bytes, a power of two."""
    offset = arith.shli(wide(index), arith.constant(wide(index).type, size.bit_length() - 1))
    return arith.addi(base, offset)


def number(array: Value, index: Value) -> Value:
    """Element `index` of an array of 32-bit elements, which neighbouring threads read too."""
    return ptx("ld.global.nc.b32 $0, [$1];", address(array, index, 4), out=i32(), volatile=True)


def agreed(operation: str, value: Value) -> Value:
    """Of the whole warp: the largest, the least, the sum."""
    return ptx(f"redux.sync.{operation} $0, $1, 0xffffffff;", value, out=i32(), volatile=True)


def sum_of_lanes(value: Value) -> Value:
    """Of the whole warp's float32, the same in every lane: of neighbours, of neighbouring pairs, and so on."""
    for distance in (1, 2, 4, 8, 16):
        code = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;"
        value = arith.addf(value, ptx(code, value, out=f32(), volatile=True))
    return value
