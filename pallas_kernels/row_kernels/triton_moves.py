"""Triton kernels that spread tokens out to rows and add rows up.

Memory is what limits them: 16 bytes a load, nothing staged.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.triton_call import capability, jit, triton_call

_COLUMNS = 512  # that a program works on: with two warps eight bfloat16 a thread, one load of 16 bytes


@jit
def gather_block(
    x_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    out_ptr: tl.tensor,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """BLOCK columns of one token, to each of its rows."""
    blocks: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    token = tl.program_id(0) // blocks
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x_ptr + token.to(tl.int64) * COLUMNS + column, mask=column < COLUMNS)
    for slot in tl.static_range(SLOTS):
        position = tl.load(positions_ptr + token * SLOTS + slot).to(tl.int64)
        columns = tl.where(position >= 0, COLUMNS, 0)
        tl.store(out_ptr + position * COLUMNS + column, values, mask=column < columns)


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


def gather_rows(x: Any, positions: Int[Array, "t x"], rows: int) -> Any:
    """`token_rows.gather_rows`, for at least one element: rows that no position names are not written."""
    return jax.tree.map(lambda leaf: _gather(leaf, positions, rows), x)


def _gather(x: Shaped[Array, "t l"], positions: Int[Array, "t x"], rows: int) -> Shaped[Array, "s l"]:
    (tokens, slots), columns = positions.shape, x.shape[1]
    return triton_call(
        gather_block,
        x,
        positions,
        out=jax.ShapeDtypeStruct((rows, columns), x.dtype),
        grid=(tokens * -(-columns // _COLUMNS),),
        target=capability(),
        warps=2,
        stages=1,
        constants={"SLOTS": slots, "COLUMNS": columns, "BLOCK": _COLUMNS},
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
