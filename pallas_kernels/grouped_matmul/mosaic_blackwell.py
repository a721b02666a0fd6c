"""Grouped matmul of MXFP4 weights on Blackwell (sm_100a), in Pallas's Mosaic GPU: codes stay four bits until on chip.

A persistent kernel of one block a multiprocessor. 128 rows of weights, a slab, are the A operand of `tcgen05.mma`,
decoded into tensor memory; rows of x are its B operand, in shared memory, so that any multiple of 16 rows is a tile. A
tile's sums stay in tensor memory too; activation and rounding happen before a result leaves the chip.

    warp 0: copies                warp 1: products              decoder                       store
    for tile: for step:           for tile:                     for tile: for step of turn:   for tile:
        await empty[stage]            await stored[sums]            await full[stage]             await summed[sums]
        copy; arrives at full         for step:                     decode to registers           for chunk of rows:
                                          await full, decoded       await taken[operand]              load, activate,
                                          start the products        to tensor memory                  round, store
                                          then: empty, taken        arrive at decoded             arrive at stored
                                      then: summed

"Then" is when the products before it are done. Weights have the order that Hopper's kernel wants: what a thread there
has in registers of 64 rows of N is what one here moves to tensor memory of each half of a slab. The same roles run in
Mosaic's interpreter; `blackwell.plain` replaces the PTX of `blackwell.native` in copies, decode and store.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.blackwell import roles
from pallas_kernels.grouped_matmul.blackwell.config import BlackwellTuning, choose_tuning
from pallas_kernels.grouped_matmul.kernel_layout import KernelWeights
from pallas_kernels.grouped_matmul.mosaic_parts.geometry import Geometry, WrittenFormat
from pallas_kernels.mxfp8 import MXFP8Array, TokenScaledArray
from pallas_kernels.situ import Activation


def grouped_matmul(
    x: Float[Array, "m k"],
    w: KernelWeights,
    group_sizes: Int[Array, " g"],
    *,
    activation: Activation | None,
    out_format: WrittenFormat = "bf16",
    tuning: BlackwellTuning | None = None,
    multiprocessors: int | None = None,
    interpret: Any = None,
) -> Float[Array, "m width"] | MXFP8Array:
    """`x[m] @ w[g].T` for every row m of group g, in float32; with an activation, of it rounded to bfloat16.

    Args:
        x: bfloat16 `[M, K]`.
        w: `[G, N, K]` from `to_kernel_layout(..., recipe="w4a16", gated=activation is not None)`.
        group_sizes: int32 `[G]`, `sum(group_sizes) <= M`; read on the device only.
        activation: a compile-time choice: `Situ(...)`, `SwiGLU()` or None.
        out_format: "bf16", "f32" (not rounded), or "mxfp8": the bits of `quantize_mxfp8` of the bfloat16 result.
        tuning: None for the one that `blackwell.config.choose_tuning` gives.
        multiprocessors: blocks to start; None for the device's number.
        interpret: `plgpu.InterpretGPUParams(...)` to run on a CPU.

    Returns:
        `[M, N]`, or `[M, N/2]` with an activation. Rows at and beyond `sum(group_sizes)` are unspecified.

    Raises:
        NotImplementedError: `why_not` says so.
    """
    reason = why_not(x, w, activation, tuning)
    if reason is not None:
        raise NotImplementedError(f"grouped_matmul on Blackwell: {reason}")
    groups, n, k = w.shape
    used = tuning or choose_tuning(x.shape[0], groups, n, k, w.gated)
    shape = Geometry(x.shape[0], groups, n, k, w.mma, activation, out_format, used)
    # The interpreter, unlike a tensor copy, reads no row beyond the last.
    rows = x if interpret is None else jnp.pad(x, ((0, used.widest), (0, 0)))
    if multiprocessors is None:
        multiprocessors = jax.devices()[0].core_count
    operands = [rows, w.words, group_sizes.astype(jnp.int32), w.exponents]
    result = _kernel(shape, multiprocessors, interpret)(*operands)
    return MXFP8Array(*result) if out_format == "mxfp8" else result[0]


def why_not(
    x: Float[Array, "m k"] | MXFP8Array | TokenScaledArray,
    w: KernelWeights,
    activation: Activation | None,
    tuning: BlackwellTuning | None = None,
) -> str | None:
    """Why `grouped_matmul` cannot take these arguments; None if it can."""
    if w.mma != "bf16":
        return f"weights laid out for {w.mma} products are Hopper's"
    if w.gated != (activation is not None):
        return f"weights laid out with gated={w.gated} do not fit activation={activation}"
    if isinstance(x, MXFP8Array | TokenScaledArray) or x.dtype != jnp.bfloat16:
        kind = type(x).__name__ if isinstance(x, MXFP8Array | TokenScaledArray) else x.dtype
        return f"x is {kind}; bfloat16 is needed"
    groups, n, k = w.shape
    try:
        used = tuning or choose_tuning(x.shape[0], groups, n, k, w.gated)
    except NotImplementedError as error:
        return str(error)
    return used.reason_against(n, k, w.gated, groups)


def how(rows: int, w: KernelWeights, gated: bool) -> str:
    """With which tuning these weights are multiplied, and where it is from."""
    return f"{w.mma} products, {choose_tuning(rows, *w.shape, gated)}, by the heuristic: none was measured"


def _kernel(shape: Geometry[BlackwellTuning], multiprocessors: int, interpret: Any) -> Callable[..., Any]:
    make: Any
    if interpret is None:
        from pallas_kernels.grouped_matmul.blackwell.native import NativeSteps, scratch

        make = NativeSteps
    else:
        from pallas_kernels.grouped_matmul.blackwell.plain import PlainSteps, scratch

        make = functools.partial(PlainSteps, scales_gmem=None)
    tuning = shape.tuning

    def grouped_matmul_blackwell(*refs: Any, sums_tmem: Any, operand_tmem: Any, barriers: Any, **memory: Any) -> None:
        names = ("x_gmem", "w_gmem", "sizes_gmem", "exponents_gmem")
        steps = make(shape=shape, **dict(zip(names, refs, strict=False)), out_gmem=refs[4:], **memory)
        block = roles.Block(shape, steps, multiprocessors, sums_tmem, operand_tmem, barriers)
        steps.start()
        role = lax.axis_index("warpgroup")
        decoder = role - tuning.slabs
        pl.when(role < tuning.slabs)(functools.partial(block.store, role))
        pl.when((decoder >= 0) & (decoder < tuning.decoders))(functools.partial(block.decode, decoder))
        pl.when(decoder == tuning.decoders)(block.copy_and_multiply)

    return plgpu.kernel(
        grouped_matmul_blackwell,
        out_type=shape.results,
        grid=(multiprocessors,),
        grid_names=("block",),
        num_threads=tuning.slabs + tuning.decoders + 1,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        scratch_types={**scratch(shape), **roles.scratch(shape)},
    )
