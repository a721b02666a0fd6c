"""The Triton kernel for weights in the order of `kernel_layout`, on sm_80 to sm_90: `mma.sync`, or `wgmma` on Hopper.

A word holds eight codes of one thread's operand, so decoding them moves nothing between threads: with Triton's layout
of the left operand, every reshape below is a name for registers that are in place already. The weights are the left
operand, decoded in registers; rows of x the right one, in shared memory. Two widths of rows share the decoded weights,
because a group's rows seldom fill a power of two.

    for step in K / (64 * K_UNITS):
        load words and rows                           (asynchronously, stages ahead)
        a = decode(words)                             [64 * UNITS, 64 * K_UNITS] bfloat16
        sums += a @ rows.T, once for each of the two widths
"""

import triton.language as tl

from pallas_kernels.grouped_matmul.triton.epilogue import (
    NONE,
    activate,
    power_of_two,
    round_to_bf16,
    store,
)
from pallas_kernels.grouped_matmul.triton.tiles import locate
from pallas_kernels.triton_call import jit

_CODES = tl.constexpr(512)  # words of codes in a unit of 64 rows by 64 columns; 32 words of scales follow
_UNIT = tl.constexpr(544)
_MASK = tl.constexpr(0x81C081C0)  # the sign and the three magnitude bits of two codes, each at the place in a bfloat16


@jit
def grouped_matmul_words(
    x_ptr: tl.tensor,
    words_ptr: tl.tensor,
    sizes_ptr: tl.tensor,
    exponents_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    out_ptr: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    UNITS: tl.constexpr,
    K_UNITS: tl.constexpr,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
    SCALED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
) -> tl.tensor:
    """One tile: 64 * UNITS rows of N by WIDE + NARROW (or, where that is 0, WIDE) rows of x."""
    group, column, row, rows = locate(
        sizes_ptr, tl.program_id(0), GROUPS, PADDED_GROUPS, WIDE + NARROW, N // (64 * UNITS)
    )
    if group >= GROUPS:
        return
    # Addresses are a scalar that advances and 32-bit offsets that do not: few registers beside the sums.
    line: tl.constexpr = K // 64 * _UNIT  # words of 64 rows of N
    unit = tl.arange(0, UNITS)[:, None, None] * line + tl.arange(0, K_UNITS)[None, :, None] * _UNIT
    codes = unit + tl.arange(0, _CODES)[None, None, :]
    scales = unit + _CODES + tl.arange(0, 32)[None, None, :]
    word_ptr = words_ptr + (group.to(tl.int64) * (N // 64) + column * UNITS) * line
    row_ptr = x_ptr + row.to(tl.int64) * K
    wide_rows = _row_offsets(row, 0, WIDE, M, K) + tl.arange(0, 64 * K_UNITS)[None, :]
    wide = tl.zeros((64 * UNITS, WIDE), tl.float32)
    if NARROW:
        narrow_rows = _row_offsets(row, WIDE, NARROW, M, K) + tl.arange(0, 64 * K_UNITS)[None, :]
        narrow = tl.zeros((64 * UNITS, NARROW), tl.float32)
    for step in range(K // (64 * K_UNITS)):
        w = word_ptr + step * (K_UNITS * _UNIT)
        x = row_ptr + step * (64 * K_UNITS)
        a = decode(tl.load(w + codes), tl.load(w + scales), UNITS, K_UNITS)
        wide = tl.dot(a, tl.load(x + wide_rows).T, wide)
        if NARROW:
            narrow = tl.dot(a, tl.load(x + narrow_rows).T, narrow)
    exponent = tl.load(exponents_ptr + group)
    _finish(
        wide, exponent, scales_ptr, out_ptr, row, rows, column, M, N, UNITS, WIDE, SCALED, ACTIVATION, BETA, LINEAR_BETA
    )
    if NARROW:
        _finish(
            narrow,
            exponent,
            scales_ptr,
            out_ptr,
            row + WIDE,
            rows - WIDE,
            column,
            M,
            N,
            UNITS,
            NARROW,
            SCALED,
            ACTIVATION,
            BETA,
            LINEAR_BETA,
        )


@jit
def _row_offsets(
    row: tl.tensor, FIRST: tl.constexpr, COUNT: tl.constexpr, M: tl.constexpr, K: tl.constexpr
) -> tl.tensor:
    """From row `row` of x to COUNT rows from `row + FIRST` on, or the last one: beyond a group sums are not stored."""
    return tl.minimum(FIRST + tl.arange(0, COUNT), M - 1 - row)[:, None] * K


@jit
def decode(words: tl.tensor, scales: tl.tensor, UNITS: tl.constexpr, K_UNITS: tl.constexpr) -> tl.tensor:
    """uint32 `[UNITS, K_UNITS, 512]` and `[UNITS, K_UNITS, 32]` to bfloat16 `[64 * UNITS, 64 * K_UNITS]`.

    A code moved to its place is a bfloat16 of 2^-126 times its value, and a stored scale s stands for 2^(s - 127): the
    product of the two is exact.
    """
    w = words.reshape(UNITS, K_UNITS, 4, 8, 4, 2, 2)  # warp, g, t, block, half
    first, second = _pair(w & _MASK), _pair((w << 6) & _MASK)
    third = _pair(((w >> 6) | (w << 26)) & _MASK)
    fourth = _pair(((w << 4) & 0x81808180) | ((w >> 4) & 0x00400040))
    pairs = tl.join(tl.join(first, third), tl.join(second, fourth))  # ..., element, pair's bit 1, pair's bit 0
    shift = tl.arange(0, 2)[:, None] * 16 + tl.arange(0, 2)[None, :] * 8
    byte = (scales.reshape(UNITS, K_UNITS, 4, 8, 1, 1, 1) >> shift.reshape(1, 1, 1, 1, 1, 2, 2)) & 0xFF
    scale = (byte << 7).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    pairs *= scale.reshape(UNITS, K_UNITS, 4, 8, 1, 2, 2, 1, 1, 1)
    # To rows [unit, warp, half, g] and columns [k unit, block, pair, t, element].
    return pairs.permute(0, 2, 6, 3, 1, 5, 8, 9, 4, 7).reshape(UNITS * 64, K_UNITS * 64)


@jit
def _pair(bits: tl.tensor) -> tl.tensor:
    """The two bfloat16s in each 32-bit word, along a new last axis."""
    low = (bits & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    high = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@jit
def _finish(
    sums: tl.tensor,
    exponent: tl.tensor,
    scales_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    column: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    UNITS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
) -> tl.tensor:
    """Scales sums `[64 * UNITS, WIDTH]`, activates, and stores the rows that exist."""
    half = exponent >> 1  # in two steps, since one power may be subnormal
    y = sums * power_of_two(half) * power_of_two(exponent - half)
    if SCALED:
        y *= tl.load(scales_ptr + tl.minimum(row + tl.arange(0, WIDTH), M - 1))[None, :]
    if ACTIVATION == NONE:
        store(y, out_ptr, row, rows, column * (64 * UNITS), N, WIDTH, N)
    else:  # of 16 rows of N, 8 are the gate's and 8 up's
        gate, up = y.reshape(4 * UNITS, 2, 8, WIDTH).permute(0, 2, 3, 1).split()
        y = activate(round_to_bf16(gate), round_to_bf16(up), ACTIVATION, BETA, LINEAR_BETA)
        store(y.reshape(32 * UNITS, WIDTH), out_ptr, row, rows, column * (32 * UNITS), N // 2, WIDTH, N // 2)
