"""Triton kernels that gather rows and that add them up. Memory is what limits them: 16 bytes a load, nothing staged."""

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Float, Int

from pallas_kernels.triton_call import capability, jit, triton_call

_COLUMNS = 512  # that a program works on: with two warps eight bfloat16 a thread, one load of 16 bytes


@jit
def gather_block(
    x_ptr: tl.tensor, tokens_ptr: tl.tensor, out_ptr: tl.tensor, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """BLOCK columns of one row of `[S, COLUMNS]`."""
    blocks: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // blocks
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens_ptr + row).to(tl.int64)
    values = tl.load(x_ptr + token * COLUMNS + column, mask=column < COLUMNS)
    tl.store(out_ptr + row.to(tl.int64) * COLUMNS + column, values, mask=column < COLUMNS)


@jit
def combine_block(
    rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """BLOCK columns of one token's sum; all its rows are asked for before the first is needed."""
    blocks: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    token = tl.program_id(0) // blocks
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(SLOTS):
        position = tl.load(positions_ptr + token * SLOTS + slot).to(tl.int64)
        weight = tl.load(weights_ptr + token * SLOTS + slot)
        columns = tl.where(position >= 0, COLUMNS, 0)
        row = tl.load(rows_ptr + position * COLUMNS + column, mask=column < columns, other=0.0)
        total += tl.where(position >= 0, row.to(tl.float32) * weight, 0.0)  # the weight of no row may be anything
    tl.store(out_ptr + token.to(tl.int64) * COLUMNS + column, total, mask=column < COLUMNS)


def gather_rows(x: Float[Array, "t l"], tokens: Int[Array, " s"]) -> Float[Array, "s l"]:
    """`token_rows.gather_rows`, for at least one element."""
    out = jax.ShapeDtypeStruct((tokens.shape[0], x.shape[1]), x.dtype)
    constants = {"COLUMNS": x.shape[1], "BLOCK": _COLUMNS}
    grid = (out.shape[0] * -(-x.shape[1] // _COLUMNS),)
    return triton_call(
        gather_block, x, tokens, out=out, grid=grid, target=capability(), warps=2, stages=1, constants=constants
    )


def combine_rows(
    rows: Float[Array, "s l"], positions: Int[Array, "t x"], weights: Float[Array, "t x"]
) -> Float[Array, "t l"]:
    """`token_rows.combine_rows`, for at least one element."""
    (tokens, slots), columns = positions.shape, rows.shape[1]
    out = jax.ShapeDtypeStruct((tokens, columns), jnp.float32)
    constants = {"SLOTS": slots, "COLUMNS": columns, "BLOCK": _COLUMNS}
    return triton_call(
        combine_block,
        rows,
        positions,
        weights,
        out=out,
        grid=(tokens * -(-columns // _COLUMNS),),
        target=capability(),
        warps=2,
        stages=1,
        constants=constants,
    )
