"""Grouped matmul of MXFP4 weights on Hopper (sm_90a), in Pallas's Mosaic GPU: codes stay four bits until in registers.

A persistent kernel of one block a multiprocessor. One warpgroup fills a ring of stages with copies; the others decode
weights to the A operand of `wgmma`, in registers, while the product before runs; rows of x are its B operand, in shared
memory, so that any multiple of 8 rows is a tile. A tile runs at the narrowest of the compiled widths that holds its
rows: only the `wgmma` itself branches on the width. Activation and rounding happen before a result leaves the chip.

    producer                                  consumer warpgroup
    for tile: for step:                       for tile: for step:
        wait until the slot is empty              wait until the slot is full
        start copies of weights and rows          for unit: decode, start its product, wait for the product before
                                                      after the first, release the slot of the step before
                                              scale, activate, round, store the rows that exist

The same kernel runs in Mosaic's interpreter, where `hopper.plain` replaces the PTX of `hopper.native`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import schedule, tuned
from pallas_kernels.grouped_matmul.config import Tuning
from pallas_kernels.grouped_matmul.hopper import roles
from pallas_kernels.grouped_matmul.kernel_layout import KernelWeights, Mma
from pallas_kernels.grouped_matmul.mosaic_parts.geometry import Geometry, WrittenFormat
from pallas_kernels.mxfp8 import MXFP8Array, TokenScaledArray
from pallas_kernels.row_kernels.mosaic_rows import dequantize_mxfp8
from pallas_kernels.situ import Activation


def grouped_matmul(
    x: Float[Array, "m k"] | MXFP8Array | TokenScaledArray,
    w: KernelWeights,
    group_sizes: Int[Array, " g"],
    *,
    activation: Activation | None,
    out_format: WrittenFormat = "bf16",
    tuning: Tuning | None = None,
    multiprocessors: int | None = None,
    interpret: Any = None,
) -> Float[Array, "m width"] | MXFP8Array:
    """`x[m] @ w[g].T` for every row m of group g, in float32; with an activation, of it rounded to bfloat16.

    Args:
        x: `[M, K]`: for weights laid out for bfloat16 products bfloat16, MXFP8 (dequantised before the kernel) or e4m3
            with a scale a token (cast before it), all exact; for e4m3 products e4m3 with a scale a token.
        w: `[G, N, K]` from `to_kernel_layout(..., gated=activation is not None)`.
        group_sizes: int32 `[G]`, `sum(group_sizes) <= M`; read on the device only.
        activation: a compile-time choice: `Situ(...)`, `SwiGLU()` or None.
        out_format: "bf16", "f32" (not rounded), or "mxfp8": the bits of `quantize_mxfp8` of the bfloat16 result.
        tuning: None for the one that `tuned.choose` gives.
        multiprocessors: blocks to start; None for the device's number.
        interpret: `plgpu.InterpretGPUParams(...)` to run on a CPU.

    Returns:
        `[M, N]`, or `[M, N/2]` with an activation. Rows at and beyond `sum(group_sizes)` are unspecified.

    Raises:
        NotImplementedError: `why_not` says so.
    """
    reason = why_not(x, w, activation, tuning)
    if reason is not None:
        raise NotImplementedError(f"grouped_matmul on Hopper: {reason}")
    values, scales = _rows(x, w.mma, dequantize_mxfp8 if interpret is None else MXFP8Array.dequantize)
    if multiprocessors is None:
        multiprocessors = jax.devices()[0].core_count
    shapes = _geometries(values.shape[0], w, activation, out_format, tuning)
    if interpret is not None:  # which, unlike a tensor copy, reads no row beyond the last
        values = jnp.pad(values, ((0, max(shape.tuning.widest for shape in shapes)), (0, 0)))
    operands = [values, w.words, group_sizes.astype(jnp.int32), w.exponents, *([] if scales is None else [scales])]
    if len(shapes) == 1:
        result = _kernel(shapes[0], scales is not None, multiprocessors, interpret)(*operands)
    else:  # Each launch writes the rows of its groups.
        written = [jax.new_ref(jax.lax.empty(part.shape, part.dtype)) for part in shapes[0].results]
        for shape in shapes:
            _kernel(shape, scales is not None, multiprocessors, interpret)(*operands, *written)
        result = [jax.freeze(part) for part in written]
    return MXFP8Array(*result) if out_format == "mxfp8" else result[0]


def why_not(
    x: Float[Array, "m k"] | MXFP8Array | TokenScaledArray,
    w: KernelWeights,
    activation: Activation | None,
    tuning: Tuning | None = None,
) -> str | None:
    """Why `grouped_matmul` cannot take these arguments; None if it can."""
    if w.mma == "e4m3" and not isinstance(x, TokenScaledArray):
        kind = type(x).__name__ if isinstance(x, MXFP8Array | TokenScaledArray) else f"{x.dtype} rows"
        return f"weights laid out for {w.mma} products cannot take {kind}"
    if w.gated != (activation is not None):
        return f"weights laid out with gated={w.gated} do not fit activation={activation}"
    if not isinstance(x, MXFP8Array | TokenScaledArray) and x.dtype != jnp.bfloat16:
        return f"x is {x.dtype}; bfloat16 is needed"
    groups, n, k = w.shape
    try:
        used = tuning or tuned.choose(x.shape[0], groups, n, k, w.mma, w.gated).tuning
    except NotImplementedError as error:
        return str(error)
    return used.reason_against(n, k, w.mma, w.gated, groups)


def how(rows: int, w: KernelWeights, gated: bool) -> str:
    """With which tuning these weights are multiplied, and where it is from."""
    chosen = tuned.choose(rows, *w.shape, w.mma, gated)
    return f"{w.mma} products, {chosen.tuning}, {chosen.source}"


def _rows(
    x: Array | MXFP8Array | TokenScaledArray, mma: Mma, dequantize: Callable[[MXFP8Array], Array]
) -> tuple[Array, Array | None]:
    """The rows the tensor cores read, and float32 `[M]` scales of them or None. e4m3 values are exact in bfloat16."""
    if isinstance(x, TokenScaledArray):
        return (x.values if mma == "e4m3" else x.values.astype(jnp.bfloat16)), x.scales[:, 0]
    return (dequantize(x) if isinstance(x, MXFP8Array) else x), None


def _geometries(
    rows: int, w: KernelWeights, activation: Activation | None, out_format: WrittenFormat, tuning: Tuning | None
) -> list[Geometry]:
    """Of each launch."""
    groups, n, k = w.shape
    used = tuning or tuned.choose(rows, groups, n, k, w.mma, w.gated).tuning
    launches = tuple(schedule.Prices(launch.widths, launch.costs) for launch in used.launches) if used.others else ()
    problem = rows, groups, n, k, w.mma, activation, out_format
    return [Geometry(*problem, launch, launches, number) for number, launch in enumerate(used.launches)]


def _kernel(shape: Geometry, scaled: bool, multiprocessors: int, interpret: Any) -> Callable[..., Any]:
    make: Any
    if interpret is None:
        from pallas_kernels.grouped_matmul.hopper.native import NativeSteps, scratch

        make = NativeSteps
    else:
        from pallas_kernels.grouped_matmul.hopper.plain import PlainSteps, scratch

        make = PlainSteps
    inputs: tuple[str, ...] = ("x_gmem", "w_gmem", "sizes_gmem", "exponents_gmem")
    if scaled:
        inputs += ("scales_gmem",)
    else:
        make = functools.partial(make, scales_gmem=None)
    return roles.kernel("grouped_matmul_hopper", shape, make, scratch(shape), inputs, multiprocessors, interpret)
