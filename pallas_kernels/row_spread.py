"""Tokens spread out to the rows of a grouped product, from the ids of their groups: what a decode step waits for."""

import functools
from typing import Any

import jax
from jaxtyping import Array, BFloat16, Int

from pallas_kernels import row_kernels, select
from pallas_kernels.mxfp8 import quantize_fp8_token, quantize_mxfp8
from pallas_kernels.slot_order import RowSchedule, schedule_rows
from pallas_kernels.token_rows import gather_rows

_QUANTIZERS = {"mxfp8": quantize_mxfp8, "fp8_token": quantize_fp8_token}


@functools.partial(jax.jit, static_argnames=("groups", "out_format", "implementation"))
def spread_rows(
    x: BFloat16[Array, "t l"],
    ids: Int[Array, "t x"],
    groups: int,
    *,
    out_format: str = "bf16",
    implementation: str | None = None,
) -> tuple[RowSchedule, Any]:
    """The order of the slots by their groups, and each row its token in `out_format`, `[S, L]`:

        schedule = schedule_rows(ids, groups)
        rows = gather_rows(quantize(x), schedule)     # quantize_mxfp8, quantize_fp8_token, or none for "bf16"

    Rows of no group, the last ones, may hold anything.

    Args:
        x: bfloat16 `[T, L]`. ids: int32 `[T, X]`; slots whose id is none of `range(groups)` (-1) belong to no group.
        out_format: "bf16", "mxfp8" (an MXFP8Array) or "fp8_token" (a TokenScaledArray).
        implementation: "reference" or "xla" (these ops, each so), "mosaic" (Hopper and Blackwell: one kernel for 2,048
            slots at most), or None for that kernel where it can, and otherwise each op in the fastest way that can.

    Raises:
        ValueError: no such format or implementation exists, or L is no multiple of 32 for "mxfp8".
        NotImplementedError: the named implementation cannot run this here, or a gradient is asked of a kernel.
    """
    if out_format != "bf16" and out_format not in _QUANTIZERS:
        raise ValueError(f"spread_rows: {out_format=} is not one of bf16, {', '.join(_QUANTIZERS)}")
    chosen = select.choose("spread_rows", implementation, x=x, ids=ids, groups=groups)
    if chosen == "mosaic" and ids.size:
        kernel = row_kernels.spreads().spread_rows
        return jax.custom_batching.sequential_vmap(lambda x, ids: kernel(x, ids, groups, out_format))(x, ids)
    each = None if chosen == "mosaic" else implementation
    schedule = schedule_rows(ids, groups, implementation=each)
    quantize = _QUANTIZERS.get(out_format)
    rows = x if quantize is None else quantize(x, implementation=each)
    return schedule, gather_rows(rows, schedule, implementation=each)
