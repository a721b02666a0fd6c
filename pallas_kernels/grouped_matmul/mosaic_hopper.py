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
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import tuned
from pallas_kernels.grouped_matmul.config import REGISTERS, Tuning
from pallas_kernels.grouped_matmul.hopper import products
from pallas_kernels.grouped_matmul.kernel_layout import KernelWeights, Mma
from pallas_kernels.grouped_matmul.mosaic_parts.geometry import Geometry, Ring, Tile, WrittenFormat
from pallas_kernels.grouped_matmul.mosaic_parts.walk import for_each_tile
from pallas_kernels.mxfp8 import MXFP8Array, TokenScaledArray
from pallas_kernels.row_kernels.mosaic_rows import dequantize_mxfp8
from pallas_kernels.situ import Activation

_LEAST_ROWS = 32  # rows of the largest tensor copy


@runtime_checkable
class Steps(Protocol):
    """What differs between the GPU and the interpreter."""

    @property
    def x_smem(self) -> Any: ...

    def start(self) -> None: ...
    def constants(self) -> tuple[Any, ...]: ...
    def locate(self, tile: Any, group: Any) -> tuple[Any, Any, Any, Any]: ...
    def fill(self, ring: Ring, tile: Tile, step: Any) -> None: ...
    def drain(self, filled: Any) -> None: ...
    def await_full(self, ring: Ring) -> None: ...
    def release(self, slot: Any, condition: Any) -> None: ...
    def operand(self, ring: Ring, warpgroup: Any, unit: int, subtile: int, index: int, constants: Any) -> Any: ...
    def zeros(self, width: int) -> Any: ...
    def add(self, total: Any, partial: Any) -> Any: ...
    def store(self, warpgroup: Any, tile: Tile, accumulators: list[Any]) -> None: ...


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
    shape = _geometry(values.shape[0], w, activation, out_format, tuning)
    padded = jnp.pad(values, ((0, max(0, _LEAST_ROWS - shape.rows)), (0, 0)))
    if multiprocessors is None:
        multiprocessors = jax.devices()[0].core_count
    operands = [padded, w.words, group_sizes.astype(jnp.int32), w.exponents, *([] if scales is None else [scales])]
    result = _kernel(shape, scales is not None, multiprocessors, interpret)(*operands)
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


def how(rows: int, w: KernelWeights) -> str:
    """With which tuning these weights are multiplied, and where it is from."""
    chosen = tuned.choose(rows, *w.shape, w.mma, w.gated)
    return f"{w.mma} products, {chosen.tuning}, {chosen.source}"


def _rows(
    x: Array | MXFP8Array | TokenScaledArray, mma: Mma, dequantize: Callable[[MXFP8Array], Array]
) -> tuple[Array, Array | None]:
    """The rows the tensor cores read, and float32 `[M]` scales of them or None. e4m3 values are exact in bfloat16."""
    if isinstance(x, TokenScaledArray):
        return (x.values if mma == "e4m3" else x.values.astype(jnp.bfloat16)), x.scales[:, 0]
    return (dequantize(x) if isinstance(x, MXFP8Array) else x), None


def _geometry(
    rows: int, w: KernelWeights, activation: Activation | None, out_format: WrittenFormat, tuning: Tuning | None
) -> Geometry:
    groups, n, k = w.shape
    used = tuning or tuned.choose(rows, groups, n, k, w.mma, w.gated).tuning
    return Geometry(rows, groups, n, k, w.mma, activation, out_format, used)


def _kernel(shape: Geometry, scaled: bool, multiprocessors: int, interpret: Any) -> Callable[..., Any]:
    if interpret is None:
        from pallas_kernels.grouped_matmul.hopper.native import NativeSteps, scratch

        make: Any = NativeSteps
    else:
        from pallas_kernels.grouped_matmul.hopper.plain import PlainSteps, scratch

        make = PlainSteps

    def grouped_matmul_hopper(*refs: Any, **memory: Any) -> None:
        inputs, out = refs[: 4 + scaled], refs[4 + scaled :]
        x, w, sizes, exponents = inputs[:4]
        steps = make(shape, x, w, sizes, exponents, inputs[4] if scaled else None, out, **memory)
        steps.start()
        role = lax.axis_index("warpgroup")
        consumers = shape.tuning.warpgroups
        pl.when(role == consumers)(functools.partial(_produce, shape, steps, multiprocessors))
        pl.when(role < consumers)(functools.partial(_consume, shape, steps, multiprocessors, role))

    return plgpu.kernel(
        grouped_matmul_hopper,
        out_type=shape.results,
        grid=(multiprocessors,),
        grid_names=("block",),
        num_threads=shape.tuning.warpgroups + 1,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        scratch_types=scratch(shape),
    )


def _produce(shape: Geometry, steps: Steps, blocks: int) -> None:
    plgpu.set_max_registers(REGISTERS[shape.tuning.warpgroups][1], action="decrease")

    def run(tile: Tile) -> None:
        def step(i: Any, ring: Ring) -> Ring:
            steps.fill(ring, tile, i)
            return shape.next(ring)

        lax.fori_loop(0, shape.k_steps, step, shape.ring_at(tile))

    steps.drain(for_each_tile(shape, steps, blocks, run) * shape.k_steps)


def _consume(shape: Geometry, steps: Steps, blocks: int, warpgroup: Any) -> None:
    plgpu.set_max_registers(REGISTERS[shape.tuning.warpgroups][0], action="increase")
    constants = steps.constants()

    def run(tile: Tile) -> None:
        products.multiply(shape, steps, warpgroup, tile, constants)

    for_each_tile(shape, steps, blocks, run)
