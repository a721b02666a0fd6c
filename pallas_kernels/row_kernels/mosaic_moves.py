"""Rows gathered and rows added up on Hopper and Blackwell, in Pallas's Mosaic GPU: each row is read once.

As in `mosaic_rows` nothing is staged: a thread loads 16 bytes at a time and, of a sum, all its rows before it adds one.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int

from pallas_kernels.row_kernels import move_emitters
from pallas_kernels.row_kernels.emitters import VECTOR
from pallas_kernels.row_kernels.mosaic_rows import MOST_VECTORS, block_count, block_kernel, vectors_a_thread


def why_not(op: str, x: Any) -> str | None:
    """Why the kernel of `op` cannot take rows or tokens `x`; None if it can."""
    if x.dtype != jnp.bfloat16:
        return f"x is {x.dtype}, and the kernel takes bfloat16"
    if x.shape[-1] % VECTOR or not x.size:
        return f"x has shape {x.shape}, and the kernel takes rows of a multiple of {VECTOR}, at least one"
    if x.size // VECTOR > MOST_VECTORS:
        return f"x has shape {x.shape}, more than {MOST_VECTORS * VECTOR} elements"
    return None


def gather_rows(x: BFloat16[Array, "t l"], tokens: Int[Array, " s"]) -> BFloat16[Array, "s l"]:
    """`token_rows.gather_rows`, for at least one row."""
    rows, columns = tokens.shape[0], x.shape[1]
    vectors = rows * columns // VECTOR
    if vectors > MOST_VECTORS:
        raise NotImplementedError(f"gather_rows in Mosaic: {rows} rows of {columns} are more than it counts in 32 bits")
    each = vectors_a_thread(vectors)
    emit = functools.partial(move_emitters.gathered, vectors, columns // VECTOR, each)
    out = (jax.ShapeDtypeStruct((rows * columns,), x.dtype),)
    (y,) = block_kernel("gather_rows", emit, out, block_count(vectors, each))(x.reshape(-1), tokens)
    return y.reshape(rows, columns)


def combine_rows(
    rows: BFloat16[Array, "s l"], positions: Int[Array, "t x"], weights: Float[Array, "t x"]
) -> Float[Array, "t l"]:
    """`token_rows.combine_rows`, for at least one token and slot."""
    (tokens, slots), columns = positions.shape, rows.shape[1]
    vectors = tokens * columns // VECTOR
    emit = functools.partial(move_emitters.combined, tokens, slots, columns // VECTOR)
    out = (jax.ShapeDtypeStruct((tokens * columns,), jnp.float32),)
    kernel = block_kernel("combine_rows", emit, out, block_count(vectors, 1))
    (y,) = kernel(rows.reshape(-1), positions.reshape(-1), weights.reshape(-1))
    return y.reshape(tokens, columns)
