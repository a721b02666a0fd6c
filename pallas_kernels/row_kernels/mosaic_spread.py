"""A few slots ordered and their tokens spread out to rows, quantised or not, in one launch on Hopper and Blackwell.

Of the few tokens of a decode step, what takes time is kernels that wait for each other. So a slot's block counts and
quantises what others count and quantise too: each id is read once a slot, each token once a slot of its own.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Int

from pallas_kernels.e8m0 import BLOCK
from pallas_kernels.mxfp8 import MXFP8Array, TokenScaledArray
from pallas_kernels.row_kernels import mosaic_orders, spread_emitters
from pallas_kernels.row_kernels.emitters import THREADS, VECTOR
from pallas_kernels.row_kernels.mosaic_rows import block_kernel
from pallas_kernels.slot_order import RowSchedule

MOST_SLOTS = 2048  # the most that was timed, on an H200: 6 us for the 8 to 9 of separate kernels
LONGEST_ROW = 8192  # columns that a block's registers hold, eight vectors of 16 bytes a thread


def why_not(x: Any, ids: Any, groups: int) -> str | None:
    """Why the kernel cannot take tokens `x` with these ids of so many groups; None if it can."""
    if ids.size > MOST_SLOTS:
        return f"{ids.size} slots are more than the {MOST_SLOTS} up to which a token may be read for each of them"
    if x.dtype != jnp.bfloat16:
        return f"x is {x.dtype}, and the kernel takes bfloat16"
    if x.shape[1] % BLOCK or not 0 < x.shape[1] <= LONGEST_ROW:
        return f"x has shape {x.shape}, and the kernel takes rows of a multiple of {BLOCK}, up to {LONGEST_ROW}"
    return mosaic_orders.why_not("schedule_rows", ids, groups)


def spread_rows(
    x: BFloat16[Array, "t l"], ids: Int[Array, "t x"], groups: int, out_format: str
) -> tuple[RowSchedule, Any]:
    """`row_spread.spread_rows`, for at least one slot and group: rows of no group are not written."""
    slots, columns = ids.size, x.shape[1]
    shape = spread_emitters.Shape(slots, ids.shape[1], groups, columns // VECTOR, THREADS // 32, out_format)
    order = [jax.ShapeDtypeStruct((size,), jnp.int32) for size in (slots, slots, groups)]
    arrays = _arrays_of_rows(columns, out_format)
    kernel = block_kernel(
        "spread_rows",
        functools.partial(spread_emitters.spread, shape),
        (*order, *(jax.ShapeDtypeStruct((slots * width,), dtype) for width, dtype in arrays)),
        slots + groups,
        table_words=spread_emitters.TABLE_WORDS,
    )
    token, row, sizes, *flat = kernel(ids.reshape(-1), x.reshape(-1))
    rows = [values.reshape(slots, -1) for values in flat]
    whole = {"mxfp8": MXFP8Array, "fp8_token": TokenScaledArray}.get(out_format)
    return RowSchedule(token, row.reshape(ids.shape), sizes), rows[0] if whole is None else whole(*rows)


def _arrays_of_rows(columns: int, out_format: str) -> tuple[tuple[int, Any], ...]:
    """Elements of a row and dtype of each."""
    values = columns, jnp.float8_e4m3fn
    return {
        "bf16": ((columns, jnp.bfloat16),),
        "mxfp8": (values, (columns // BLOCK, jnp.uint8)),
        "fp8_token": (values, (1, jnp.float32)),
    }[out_format]
