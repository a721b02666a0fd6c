"""A Triton kernel that picks the largest of each row: a program holds a row, and takes its largest k times over.

Value and index are one 64-bit key, so that one maximum finds both: the value's bits in an order that integers have, and
below them the index counted down, so that of equal values the first is the largest.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Float, Int

from pallas_kernels.triton_call import capability, jit, triton_call

LONGEST_ROW = 4096  # that a program's registers hold
_MANY_ROWS = 512  # from there on there are more programs than the GPU runs at once, and one warp wastes least


def why_not(values: Any) -> str | None:
    """Why the kernel cannot take `values`; None if it can."""
    if values.dtype != jnp.float32:
        return f"values are {values.dtype}, and the kernel takes float32"
    if values.shape[-1] > LONGEST_ROW:
        return f"rows of {values.shape[-1]} are longer than the {LONGEST_ROW} that registers hold"
    return None


@jit
def take_largest(
    values_ptr: tl.tensor, places_ptr: tl.tensor, COLUMNS: tl.constexpr, PICKS: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """The places of one row's PICKS largest."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    value = tl.load(values_ptr + row * COLUMNS + column, mask=column < COLUMNS, other=0.0)
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    # Negative numbers' magnitudes count downwards; NaN lies below every number, what is past the end below NaN.
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(value == value, ordered, -0x7FFFFFFF)
    key = (ordered.to(tl.int64) << 32) | (BLOCK - 1 - column).to(tl.int64)
    nothing = tl.full((BLOCK,), -0x7FFFFFFFFFFFFFFF, tl.int64)
    key = tl.where(column < COLUMNS, key, nothing)
    for pick in range(PICKS):
        largest = tl.max(key, 0)
        tl.store(places_ptr + row * PICKS + pick, BLOCK - 1 - (largest & (BLOCK - 1)).to(tl.int32))
        key = tl.where(key == largest, nothing, key)


def top_k(values: Float[Array, "t n"], k: int) -> Int[Array, "t k"]:
    """`top_k.stable_top_k`, for at least one value and pick."""
    rows, columns = values.shape
    return triton_call(
        take_largest,
        values,
        out=jax.ShapeDtypeStruct((rows, k), jnp.int32),
        grid=(rows,),
        target=capability(),
        warps=1 if rows >= _MANY_ROWS else 4,
        stages=1,
        constants={"COLUMNS": columns, "PICKS": k, "BLOCK": max(32, 1 << (columns - 1).bit_length())},
    )
