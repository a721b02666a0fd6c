"""Grouped matmul of bfloat16 weights on Hopper (sm_90a), in Pallas's Mosaic GPU, with the activation in its epilogue.

The roles, ring and schedule of `mosaic_hopper`. Both operands of `wgmma` are in shared memory, where tensor copies
bring the weights as they are: 64 rows of N are one product's A operand, rows of x its B operand. Of gated weights a
copy brings 8 rows of gate and 8 of up alternately, so that one thread's sums hold both of a column.

With a single group, as a dense layer has, all rows of x are multiplied, whatever the group's size: the rows beyond it
are unspecified, and no copy waits for a number from memory.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int

from pallas_kernels.fp8_block import FP8BlockArray
from pallas_kernels.grouped_matmul.hopper import roles
from pallas_kernels.grouped_matmul.hopper.dense_config import DenseTuning, choose_tuning
from pallas_kernels.grouped_matmul.hopper.dense_geometry import DenseGeometry
from pallas_kernels.mxfp8 import MXFP8Array, TokenScaledArray
from pallas_kernels.situ import Activation


def grouped_matmul(
    x: BFloat16[Array, "m k"],
    w: BFloat16[Array, "g n k"],
    group_sizes: Int[Array, " g"],
    *,
    activation: Activation | None,
    addend: BFloat16[Array, "m n"] | None = None,
    out_format: Literal["bf16", "f32"] = "bf16",
    fine_sums: bool = False,
    tuning: DenseTuning | None = None,
    multiprocessors: int | None = None,
    interpret: Any = None,
) -> Float[Array, "m width"]:
    """`x[m] @ w[g].T` for every row m of group g, in float32; with an activation, of it rounded to bfloat16.

    Args:
        x: bfloat16 `[M, K]`.
        w: bfloat16 `[G, N, K]`; with an activation, N counts gate and then up rows.
        group_sizes: int32 `[G]`, `sum(group_sizes) <= M`; read on the device only, and not at all where G is 1.
        activation: a compile-time choice: `Situ(...)`, `SwiGLU()` or None.
        addend: bfloat16 `[M, N]`, to add to the rounded result, which is rounded once more; or None. Only without an
            activation, and to "bf16".
        out_format: "bf16", or "f32" (not rounded).
        fine_sums: asks `choose_tuning` for a tile that adds up 1,024 columns at a time.
        tuning: None for the one that `dense_config.choose_tuning` gives.
        multiprocessors: blocks to start at most; None for the device's number.
        interpret: `plgpu.InterpretGPUParams(...)` to run on a CPU.

    Returns:
        `[M, N]`, or `[M, N/2]` with an activation. Rows at and beyond `sum(group_sizes)` are unspecified.

    Raises:
        NotImplementedError: `why_not` says so.
    """
    reason = why_not(x, w, activation, tuning)
    if reason is not None:
        raise NotImplementedError(f"grouped_matmul on Hopper: {reason}")
    groups, n, k = w.shape
    used = tuning or choose_tuning(x.shape[0], groups, n, k, activation is not None, fine_sums=fine_sums)
    assert addend is None or (activation is None and out_format == "bf16")
    shape = DenseGeometry(x.shape[0], groups, n, k, "bf16", activation, out_format, used, has_addend=addend is not None)
    if multiprocessors is None:
        multiprocessors = jax.devices()[0].core_count
    blocks = min(multiprocessors, shape.whole_tiles) if shape.whole else multiprocessors
    # The interpreter, unlike a tensor copy, reads no row beyond the last.
    rows = x if interpret is None else jnp.pad(x, ((0, used.widest), (0, 0)))
    operands = rows, w.reshape(shape.weights), group_sizes.astype(jnp.int32)
    (y,) = _kernel(shape, blocks, interpret)(*operands, *(() if addend is None else (addend,)))
    return y


def why_not(
    x: Float[Array, "m k"] | MXFP8Array | TokenScaledArray,
    w: Float[Array, "g n k"],
    activation: Activation | None,
    tuning: DenseTuning | None = None,
) -> str | None:
    """Why `grouped_matmul` cannot take these arguments; None if it can."""
    if isinstance(x, MXFP8Array | TokenScaledArray):
        return f"bfloat16 weights cannot take {type(x).__name__}"
    return _why_not(x, w.dtype, w.shape, activation, tuning)


def why_not_one(x: Any, w: Any, activation: Activation | None) -> str | None:
    """Why it cannot take `w [..., N, K]`, its leading axes joined to its rows, as the only group; None if it can.

    An FP8BlockArray is taken for what it is decoded to.
    """
    return _why_not(x, jnp.bfloat16 if isinstance(w, FP8BlockArray) else w.dtype, _one_group(w), activation)


def _why_not(
    x: Any, dtype: Any, shape: tuple[int, ...], activation: Activation | None, tuning: DenseTuning | None = None
) -> str | None:
    for name, of_operand in (("x", x.dtype), ("w", dtype)):
        if of_operand != jnp.bfloat16:
            return f"{name} is {of_operand}; bfloat16 is needed"
    groups, n, k = shape
    gated = activation is not None
    try:
        used = tuning or choose_tuning(x.shape[0], groups, n, k, gated)
    except NotImplementedError as error:
        return str(error)
    return used.reason_against(n, k, gated, groups)


def how(rows: int, w: BFloat16[Array, "g n k"], gated: bool) -> str:
    """With which tuning these weights are multiplied, and where it is from."""
    return _how(rows, w.shape, gated)


def how_one(rows: int, w: Any, gated: bool) -> str:
    """The same of `w [..., N, K]`, the only group."""
    return _how(rows, _one_group(w), gated)


def _how(rows: int, shape: tuple[int, ...], gated: bool) -> str:
    groups, n, k = shape
    return f"bf16 products, {choose_tuning(rows, groups, n, k, gated)}, by the heuristic"


def _one_group(w: Any) -> tuple[int, int, int]:
    return 1, math.prod(w.shape[:-1]), w.shape[-1]


def _kernel(shape: DenseGeometry, blocks: int, interpret: Any) -> Callable[..., Any]:
    make: Any
    if interpret is None:
        from pallas_kernels.grouped_matmul.hopper.dense_native import DenseSteps, scratch

        make = DenseSteps
    else:
        from pallas_kernels.grouped_matmul.hopper.dense_plain import DensePlainSteps, scratch

        make = DensePlainSteps
    make = functools.partial(make, exponents_gmem=None, scales_gmem=None, addend_gmem=None)
    inputs = ("x_gmem", "w_gmem", "sizes_gmem", *(("addend_gmem",) if shape.has_addend else ()))
    return roles.kernel("grouped_matmul_hopper_dense", shape, make, scratch(shape), inputs, blocks, interpret)
