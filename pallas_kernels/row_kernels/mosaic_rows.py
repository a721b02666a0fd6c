"""Gated activations and quantisers on Hopper (sm_90a) and Blackwell (sm_100a), in Pallas's Mosaic GPU.

Rows are read once and results written once. What limits that is memory, so nothing is staged: a thread loads 16 bytes
at a time, several loads before the first use, and stores what it made of them. A scale of 32 columns is agreed on by
the four lanes that hold them, a token's by the warp that holds the whole row in registers.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float

from pallas_kernels.e8m0 import BLOCK
from pallas_kernels.grouped_matmul.mosaic_parts.decode import SCALAR
from pallas_kernels.grouped_matmul.mosaic_parts.ptx import global_address, scalar, shared_address
from pallas_kernels.mxfp8 import MXFP8Array, TokenScaledArray
from pallas_kernels.rms_norm import normalize
from pallas_kernels.row_kernels import emitters
from pallas_kernels.row_kernels.emitters import THREADS, VECTOR
from pallas_kernels.situ import Activation, apply_activation

# Of a token that a warp holds: with a scale of its own 128 registers a thread, and as many with gains for half of it.
_LONGEST_ROW = {"quantize_fp8_token": 8192, "rms_norm": 4096}
MOST_VECTORS = 1 << 30  # twice as many are counted in 32 bits
_FEW_VECTORS = 1 << 18  # about as many threads as an H200 runs at once: one each, and no thread waits for another
_VECTORS_A_THREAD = 2  # where there are more; three and four were no faster


def why_not(op: str, x: Any) -> str | None:
    """Why the kernel of `op` cannot take the array `x`; None if it can."""
    taken = "float32" if op == "rms_norm" else "bfloat16"
    if x.dtype != taken:
        return f"x is {x.dtype}, and the kernel takes {taken}"
    step = {"quantize_mxfp8": BLOCK, "quantize_fp8_token": VECTOR, "rms_norm": VECTOR}.get(op, 2 * VECTOR)
    if x.ndim < 1 or x.shape[-1] % step or not x.size:
        return f"x has shape {x.shape}, and the kernel takes rows of a multiple of {step}, at least one"
    longest = _LONGEST_ROW.get(op, x.shape[-1])
    if x.shape[-1] > longest:
        return f"rows of {x.shape[-1]} are longer than the {longest} that a warp's registers hold"
    if x.size // VECTOR > MOST_VECTORS:
        return f"x has shape {x.shape}, more than {MOST_VECTORS * VECTOR} elements"
    return None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def gated(activation: Activation, gate_up: BFloat16[Array, "... two_f"]) -> BFloat16[Array, "... f"]:
    """`apply_activation`, but for a few of float32's last bits before the rounding."""

    def rows(gate_up: Array) -> Array:
        lead, width = gate_up.shape[:-1], gate_up.shape[-1] // 2
        vectors = gate_up.size // (2 * VECTOR)
        each = vectors_a_thread(vectors)
        emit = functools.partial(emitters.gated, activation, vectors, width // VECTOR, each)
        results = (jax.ShapeDtypeStruct((vectors * VECTOR,), jnp.bfloat16),)
        (y,) = block_kernel("gated_activation", emit, results, block_count(vectors, each))(gate_up.reshape(-1))
        return y.reshape(*lead, width)

    return _by_rows(rows)(gate_up)


@gated.defjvp
def _gated_jvp(activation: Activation, primals: Any, tangents: Any) -> tuple[Array, Array]:
    formula = functools.partial(apply_activation, activation)
    return gated(activation, *primals), jax.jvp(formula, primals, tangents)[1]


def quantize_mxfp8(x: BFloat16[Array, "... k"]) -> MXFP8Array:
    """The bits of `pallas_kernels.quantize_mxfp8`."""

    def rows(x: Array) -> MXFP8Array:
        vectors = x.size // VECTOR
        each = vectors_a_thread(vectors)
        emit = functools.partial(emitters.mxfp8, vectors, each)
        results = (
            jax.ShapeDtypeStruct((x.size,), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((x.size // BLOCK,), jnp.uint8),
        )
        kernel = block_kernel("quantize_mxfp8", emit, results, block_count(vectors, each))
        values, scales = kernel(x.reshape(-1))
        return MXFP8Array(values.reshape(x.shape), scales.reshape(*x.shape[:-1], x.shape[-1] // BLOCK))

    return _by_rows(rows)(lax.stop_gradient(x))


def dequantize_mxfp8(q: MXFP8Array) -> BFloat16[Array, "..."]:
    """The bits of `q.dequantize()`."""

    vectors = q.values.size // VECTOR
    each = 2 * vectors_a_thread(vectors)  # a load is half as long
    emit = functools.partial(emitters.dequantized_mxfp8, vectors, each)
    results = (jax.ShapeDtypeStruct((q.values.size,), jnp.bfloat16),)
    kernel = block_kernel("dequantize_mxfp8", emit, results, block_count(vectors, each))
    (y,) = kernel(q.values.reshape(-1), q.scales.reshape(-1))
    return y.reshape(q.shape)


def quantize_fp8_token(x: BFloat16[Array, "... k"]) -> TokenScaledArray:
    """The bits of `pallas_kernels.quantize_fp8_token`."""

    def rows(x: Array) -> TokenScaledArray:
        count = x.size // x.shape[-1]
        emit = functools.partial(emitters.fp8_token, count, x.shape[-1] // VECTOR)
        results = (jax.ShapeDtypeStruct((x.size,), jnp.float8_e4m3fn), jax.ShapeDtypeStruct((count,), jnp.float32))
        kernel = block_kernel("quantize_fp8_token", emit, results, -(-count // (THREADS // 32)))
        values, scales = kernel(x.reshape(-1))
        return TokenScaledArray(values.reshape(x.shape), scales.reshape(*x.shape[:-1], 1))

    return _by_rows(rows)(lax.stop_gradient(x))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def rms_norm(eps: float, x: Float[Array, "... n"], weight: BFloat16[Array, " n"]) -> BFloat16[Array, "... n"]:
    """`rms_norm.normalize` of float32, but for the order of its sum and a last bit of the root."""

    def rows(x: Array, weight: Array) -> Array:
        count = x.size // x.shape[-1]
        emit = functools.partial(emitters.normalized, count, x.shape[-1] // VECTOR, eps)
        results = (jax.ShapeDtypeStruct((x.size,), jnp.bfloat16),)
        (y,) = block_kernel("rms_norm", emit, results, -(-count // (THREADS // 32)))(x.reshape(-1), weight)
        return y.reshape(x.shape)

    return jax.custom_batching.sequential_vmap(rows)(x, weight)


@rms_norm.defjvp
def _rms_norm_jvp(eps: float, primals: Any, tangents: Any) -> tuple[Array, Array]:
    return rms_norm(eps, *primals), jax.jvp(functools.partial(normalize, eps), primals, tangents)[1]


def _by_rows(function: Callable[[Array], Any]) -> Callable[[Array], Any]:
    """`function`, whose `vmap` is itself: a batch is more rows."""
    batched = jax.custom_batching.custom_vmap(function)

    @batched.def_vmap
    def _(size: int, in_batched: Any, x: Array) -> tuple[Any, Any]:
        del size, in_batched
        y = _by_rows(function)(x)
        return y, jax.tree.map(lambda _: True, y)

    return batched


def vectors_a_thread(vectors: int) -> int:
    return 1 if vectors <= _FEW_VECTORS else _VECTORS_A_THREAD


def block_count(vectors: int, each: int) -> int:
    return -(-vectors // (THREADS * each))


def block_kernel(
    name: str,
    emit: Callable[..., None],
    results: tuple[jax.ShapeDtypeStruct, ...],
    blocks: int,
    *,
    warpgroups: int = 1,
    table_words: int = 0,
) -> Callable[..., Any]:
    """A kernel of blocks of one or more warpgroups, each of which runs `emit(block, *operands, *results)` on addresses.

    A table of so many words in shared memory, where there is one, comes last.
    """

    def body(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(SCALAR, *(plgpu.RefType() for _ in refs)))
        def run(ctx: Any, block: Any, *refs: Any) -> None:
            del ctx
            arrays, tables = refs[: len(refs) - len(scratch)], refs[len(refs) - len(scratch) :]
            emit(scalar(block), *map(global_address, arrays), *map(shared_address, tables))

        run(lax.axis_index("block"), *refs)

    scratch = (plgpu.SMEM((table_words,), jnp.int32),) if table_words else ()
    body.__name__ = name
    return plgpu.kernel(
        body,
        out_type=results,
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups if warpgroups > 1 else None,
        thread_name="warpgroup" if warpgroups > 1 else None,
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
