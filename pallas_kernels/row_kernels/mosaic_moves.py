"""Tokens spread out to rows, and rows added up or copied, on Hopper and Blackwell, in Mosaic GPU: each is read once.

As in `mosaic_rows` nothing is staged: a thread loads 16 bytes at a time and, of a sum, all its rows before it adds one.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int, Shaped

from pallas_kernels.row_kernels import move_emitters
from pallas_kernels.row_kernels.emitters import VECTOR
from pallas_kernels.row_kernels.mosaic_rows import MOST_VECTORS, block_count, block_kernel

VECTOR_BYTES, WORD_BYTES = 16, 4
_MOST_COPIED = 1 << 19  # elements that `after` copies in less time than a decode step gains by the order


def why_not(op: str, x: Any) -> str | None:
    """Why the kernel of `op` cannot take rows or tokens `x`; None if it can."""
    values, *scales = jax.tree.leaves(x)
    if values.dtype != jnp.bfloat16 and (op != "gather_rows" or not scales):
        return f"x is {values.dtype}, and the kernel takes bfloat16"
    row, *scale = (leaf.shape[-1] * leaf.dtype.itemsize for leaf in (values, *scales))
    if row % VECTOR_BYTES or any(size % WORD_BYTES for size in scale) or not values.size:
        sizes = " and ".join(map(str, (row, *scale)))
        return f"its rows are of {sizes} bytes, and the kernel moves {VECTOR_BYTES} at a time, of scales {WORD_BYTES}"
    most = _MOST_COPIED if op == "after" else MOST_VECTORS * VECTOR
    if values.size > most:
        return f"x has shape {x.shape}, more than {most} elements"
    return None


def gather_rows(x: Any, positions: Int[Array, "t x"], rows: int) -> Any:
    """`token_rows.gather_rows`, for at least one row: rows that no position names are not written."""
    leaves, tree = jax.tree.flatten(x)
    row_bytes = [leaf.shape[1] * leaf.dtype.itemsize for leaf in leaves]
    vectors, words = row_bytes[0] // VECTOR_BYTES, sum(row_bytes[1:]) // WORD_BYTES
    tokens, slots = positions.shape
    emit = functools.partial(move_emitters.gathered, tokens, slots, vectors, words)
    out = tuple(jax.ShapeDtypeStruct((rows * leaf.shape[1],), leaf.dtype) for leaf in leaves)
    kernel = block_kernel("gather_rows", emit, out, block_count(tokens * (vectors + words), 1))
    moved = kernel(positions.reshape(-1), *(leaf.reshape(-1) for leaf in leaves))
    return jax.tree.unflatten(
        tree, [flat.reshape(rows, leaf.shape[1]) for flat, leaf in zip(moved, leaves, strict=True)]
    )


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


@jax.custom_jvp
def after(x: BFloat16[Array, "..."], earlier: Shaped[Array, "..."]) -> BFloat16[Array, "..."]:
    """`ordering.after`: the copy is a kernel with an operand that it does not read."""

    def copied(x: Array, earlier: Array) -> Array:
        vectors = x.size // VECTOR
        out = (jax.ShapeDtypeStruct((x.size,), x.dtype),)
        kernel = block_kernel("after", functools.partial(move_emitters.copied, vectors), out, block_count(vectors, 1))
        (y,) = kernel(x.reshape(-1), earlier.reshape(-1))
        return y.reshape(x.shape)

    batched = jax.custom_batching.custom_vmap(copied)

    @batched.def_vmap
    def _(size: int, in_batched: Any, x: Array, earlier: Array) -> tuple[Array, bool]:
        del size
        return after(x, earlier), in_batched[0]

    return batched(x, earlier)


@after.defjvp
def _after_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    return after(*primals), tangents[0]
