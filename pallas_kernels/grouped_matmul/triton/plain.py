"""The Triton kernel for weights as they are: bfloat16, or MXFP4 as the checkpoint has them, for `tl.dot_scaled`.

The weights are the left operand, so that its 128 rows, which Blackwell's block-scaled product needs, are there for any
number of rows of x. There `tl.dot_scaled` of MXFP4 by e4m3 is one instruction, and MXFP4 by bfloat16 a bfloat16 product
of decoded weights; on older GPUs both are the latter. Gate and up have sums of their own, in which a thread finds both.

    for step in K / BLOCK_K:
        gate += w[rows of the gate] @ x.T             [BLOCK, WIDTH]
        up   += w[rows of up] @ x.T                   with an activation
"""

import triton.language as tl

from pallas_kernels.grouped_matmul.triton.epilogue import NONE, activate, round_to_bf16, store
from pallas_kernels.grouped_matmul.triton.tiles import locate
from pallas_kernels.triton_call import jit

BF16 = tl.constexpr(0)  # rows of bfloat16
E4M3 = tl.constexpr(1)  # e4m3 with one scale byte a 32-block
TOKEN = tl.constexpr(2)  # e4m3, or the same numbers in bfloat16, with one float32 scale a row


@jit
def grouped_matmul_plain(
    x_ptr: tl.tensor,
    x_scales_ptr: tl.tensor,
    w_ptr: tl.tensor,
    w_scales_ptr: tl.tensor,
    sizes_ptr: tl.tensor,
    out_ptr: tl.tensor,
    M: tl.constexpr,
    COLUMNS: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDTH: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
) -> tl.tensor:
    """One tile of the result: BLOCK of its COLUMNS, by WIDTH rows of x."""
    blocks: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    parts: tl.constexpr = 1 if ACTIVATION == NONE else 2
    group, block, row, rows = locate(sizes_ptr, tl.program_id(0), GROUPS, PADDED_GROUPS, WIDTH, blocks)
    if group >= GROUPS:
        return
    # Beyond the last column or a group's last row a block works on others, and does not store what comes of it.
    column = tl.minimum(block * BLOCK + tl.arange(0, BLOCK), COLUMNS - 1)
    token = tl.minimum(tl.arange(0, WIDTH), M - 1 - row)
    first = group.to(tl.int64) * (parts * COLUMNS)
    x_ptr += row.to(tl.int64) * K
    x_scales_ptr += row.to(tl.int64) * (1 if ROWS == TOKEN else K // 32)
    y = tl.zeros((BLOCK, WIDTH), tl.float32)
    if ACTIVATION != NONE:
        up = tl.zeros((BLOCK, WIDTH), tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K)):
        k = step * BLOCK_K
        x = _block(x_ptr, token, k, K, BLOCK_K)
        if ROWS == E4M3:
            x_scales = _block(x_scales_ptr, token, k // 32, K // 32, BLOCK_K // 32)
        elif x.dtype != tl.bfloat16:  # a token's scale comes at the end; without one a block-scaled product is none
            x_scales = tl.full((WIDTH, BLOCK_K // 32), 127, tl.uint8)
        else:
            x_scales = None
        y = _multiply(w_ptr, w_scales_ptr, first, column, k, x, x_scales, y, K, BLOCK_K, PACKED, ROWS)
        if ACTIVATION != NONE:
            up = _multiply(w_ptr, w_scales_ptr, first + COLUMNS, column, k, x, x_scales, up, K, BLOCK_K, PACKED, ROWS)
    if ROWS == TOKEN:
        scale = tl.load(x_scales_ptr + token)[None, :]
        y *= scale
    if ACTIVATION != NONE:
        if ROWS == TOKEN:
            up *= scale
        y = activate(round_to_bf16(y), round_to_bf16(up), ACTIVATION, BETA, LINEAR_BETA)
    store(y, out_ptr, row, rows, block * BLOCK, COLUMNS, WIDTH, COLUMNS)


@jit
def _multiply(
    w_ptr: tl.tensor,
    w_scales_ptr: tl.tensor,
    first: tl.tensor,
    column: tl.tensor,
    k: tl.tensor,
    x: tl.tensor,
    x_scales: tl.tensor,
    sums: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """`sums` and BLOCK_K columns more of rows `first + column` of w by x."""
    if PACKED:
        codes = _block(w_ptr + first * (K // 2), column, k // 2, K // 2, BLOCK_K // 2)
        scales = _block(w_scales_ptr + first * (K // 32), column, k // 32, K // 32, BLOCK_K // 32)
        kind: tl.constexpr = "bf16" if x.dtype == tl.bfloat16 else "e4m3"
        sums = tl.dot_scaled(codes, scales, "e2m1", x.T, x_scales, kind, sums)
    else:
        sums = tl.dot(_block(w_ptr + first * K, column, k, K, BLOCK_K), x.T, sums)
    return sums


@jit
def _block(ptr: tl.tensor, row: tl.tensor, column: tl.tensor, COLUMNS: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """WIDTH columns from `column` on of the rows `row` of an array with COLUMNS columns; zeros beyond the last."""
    offset = tl.arange(0, WIDTH)[None, :]
    at = ptr + column + (row[:, None] * COLUMNS + offset)
    return tl.load(at, mask=offset < COLUMNS - column, other=0.0) if COLUMNS % WIDTH else tl.load(at)
