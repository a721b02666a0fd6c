"""Triton kernels of one pass over rows: the gated activations, and the quantisers, equal to the references to the bit.

The quantisers work on the bits of float32, since a GPU's approximate divisions and powers would round otherwise.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Float

from pallas_kernels import e8m0
from pallas_kernels.grouped_matmul.triton.epilogue import activate
from pallas_kernels.grouped_matmul.triton_gemm import activation_constants
from pallas_kernels.mxfp8 import MXFP8Array, TokenScaledArray
from pallas_kernels.situ import Activation, apply_activation
from pallas_kernels.triton_call import capability, jit, triton_call

_BLOCK = 1024  # elements that a program works on at a time
_INFINITY = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)


@jit
def activate_rows(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
) -> tl.tensor:
    """BLOCK columns of one row of `[R, 2 * COLUMNS]`, gate and up, to `[R, COLUMNS]`."""
    blocks: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // blocks
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    at = x_ptr + row.to(tl.int64) * (2 * COLUMNS) + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + COLUMNS, mask=inside, other=0.0).to(tl.float32)
    y = activate(gate, up, ACTIVATION, BETA, LINEAR_BETA)
    tl.store(out_ptr + row.to(tl.int64) * COLUMNS + column, y.to(out_ptr.dtype.element_ty), mask=inside)


@jit
def quantize_blocks(
    x_ptr: tl.tensor, values_ptr: tl.tensor, scales_ptr: tl.tensor, BLOCKS: tl.constexpr, COUNT: tl.constexpr
) -> tl.tensor:
    """COUNT blocks of 32 elements, of BLOCKS in all, to e4m3 and one scale byte each."""
    block = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    at = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = block < BLOCKS
    bits = _float32_bits(x_ptr + at, inside[:, None])
    byte = _scale_byte(tl.max(bits & 0x7FFFFFFF, 1))
    tl.store(values_ptr + at, _e4m3(bits, byte[:, None]), mask=inside[:, None])
    tl.store(scales_ptr + block, byte.to(tl.uint8), mask=inside)


@jit
def quantize_tokens(
    x_ptr: tl.tensor, values_ptr: tl.tensor, scales_ptr: tl.tensor, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """One row to e4m3 and a float32 scale: its largest magnitude first, then its values, in a cache by then."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        bits = _float32_bits(x_ptr + row * COLUMNS + column, column < COLUMNS)
        largest = tl.maximum(largest, bits & 0x7FFFFFFF)
    byte = tl.maximum(_scale_byte(tl.max(largest, 0)), 1)  # a subnormal scale would be flushed when used
    scale = tl.where(byte == 255, _NAN, byte << 23)
    tl.store(scales_ptr + row, scale.to(tl.float32, bitcast=True))
    for start in range(0, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        bits = _float32_bits(x_ptr + row * COLUMNS + column, column < COLUMNS)
        tl.store(values_ptr + row * COLUMNS + column, _e4m3(bits, byte), mask=column < COLUMNS)


@jit
def _float32_bits(at: tl.tensor, inside: tl.tensor) -> tl.tensor:
    return tl.load(at, mask=inside, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)


@jit
def _scale_byte(largest: tl.tensor) -> tl.tensor:
    """The byte of `2^ceil(log2(largest / 448))` from the bits of a magnitude; 255 for infinities and NaNs."""
    saturates = ((largest & 0x7FFFFF) > 0x600000).to(tl.int32)  # 448 = 1.75 * 2^8
    byte = tl.maximum((largest >> 23) - 8 + saturates, 0)
    return tl.where(largest >= _INFINITY, 255, byte)


@jit
def _e4m3(bits: tl.tensor, byte: tl.tensor) -> tl.tensor:
    """The code of `x / 2^(byte - 127)`, nearest, ties to even, from the bits of float32 x; 0 where the byte is 255."""
    magnitude = bits & 0x7FFFFFFF
    # A subnormal x is an integer times 2^-149. What the scale takes below the normal range is far below e4m3's.
    small = tl.where(byte <= 64, (105 - tl.minimum(byte, 64)) << 23, 0).to(tl.float32, bitcast=True)
    subnormal = (magnitude.to(tl.float32) * small).to(tl.int32, bitcast=True)
    normal = tl.where((magnitude >> 23) + 127 > byte, magnitude + ((127 - byte) << 23), 0)
    scaled = tl.where(magnitude < 0x800000, subnormal, normal)
    # Round away 20 of 23 mantissa bits; below e4m3's normal range adding 2^14 rounds to its step.
    rounded = ((scaled + 0x7FFFF + ((scaled >> 20) & 1)) >> 20) - 960
    tiny = (scaled.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 15
    code = tl.where(scaled < 0x3C800000, tiny, rounded) | ((bits >> 24) & 0x80)
    return tl.where(byte == 255, 0, code).to(tl.uint8)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def gated(activation: Activation, gate_up: Float[Array, "... two_f"]) -> Float[Array, "... f"]:
    """`apply_activation(activation, gate_up)`, but for a few of float32's last bits before the rounding."""
    return _along_rows(functools.partial(_gated, activation))(gate_up)


@gated.defjvp
def _gated_jvp(activation: Activation, primals: Any, tangents: Any) -> tuple[Array, Array]:
    formula = functools.partial(apply_activation, activation)
    return gated(activation, *primals), jax.jvp(formula, primals, tangents)[1]


def quantize_mxfp8(x: Float[Array, "... k"]) -> MXFP8Array:
    """As `mxfp8.quantize_mxfp8`, to the bit."""
    return _along_rows(_quantize_mxfp8)(jax.lax.stop_gradient(x))


def quantize_fp8_token(x: Float[Array, "... k"]) -> TokenScaledArray:
    """As `mxfp8.quantize_fp8_token`, to the bit."""
    return _along_rows(_quantize_fp8_token)(jax.lax.stop_gradient(x))


def _along_rows(function: Callable[[Array], Any]) -> Callable[[Array], Any]:
    """`function` of arrays with any leading axes; under `vmap` a batch is one more of them."""
    mapped = jax.custom_batching.custom_vmap(function)

    @mapped.def_vmap
    def rule(size: int, batched: Any, x: Array) -> Any:
        del size, batched
        y = _along_rows(function)(x)
        return y, jax.tree.map(lambda _: True, y)

    return mapped


def _gated(activation: Activation, x: Array) -> Array:
    columns = x.shape[-1] // 2
    out = jax.ShapeDtypeStruct((*x.shape[:-1], columns), x.dtype)
    if out.size == 0:
        return jnp.zeros(out.shape, out.dtype)
    constants = {"COLUMNS": columns, "BLOCK": _BLOCK, **activation_constants(activation)}
    grid = (out.size // columns * -(-columns // _BLOCK),)
    return _call(activate_rows, x, out, grid, constants)


def _quantize_mxfp8(x: Array) -> MXFP8Array:
    blocks = x.size // e8m0.BLOCK
    values = jax.ShapeDtypeStruct(x.shape, jnp.uint8)
    scales = jax.ShapeDtypeStruct((*x.shape[:-1], x.shape[-1] // e8m0.BLOCK), jnp.uint8)
    if blocks == 0:
        return MXFP8Array(jnp.zeros(x.shape, jnp.float8_e4m3fn), jnp.zeros(scales.shape, jnp.uint8))
    count = _BLOCK // e8m0.BLOCK
    constants = {"BLOCKS": blocks, "COUNT": count}
    codes, bytes_ = _call(quantize_blocks, x, (values, scales), (-(-blocks // count),), constants)
    return MXFP8Array(jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), bytes_)


def _quantize_fp8_token(x: Array) -> TokenScaledArray:
    columns = x.shape[-1]
    values = jax.ShapeDtypeStruct(x.shape, jnp.uint8)
    scales = jax.ShapeDtypeStruct((*x.shape[:-1], 1), jnp.float32)
    if x.size == 0:  # a token without elements has the scale of zeros
        smallest = jnp.float32(2.0**-126)
        return TokenScaledArray(jnp.zeros(x.shape, jnp.float8_e4m3fn), jnp.full(scales.shape, smallest))
    constants = {"COLUMNS": columns, "BLOCK": _BLOCK}
    codes, scale = _call(quantize_tokens, x, (values, scales), (x.size // columns,), constants)
    return TokenScaledArray(jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), scale)


def _call(kernel: Any, x: Array, out: Any, grid: tuple[int, ...], constants: dict[str, Any]) -> Any:
    return triton_call(kernel, x, out=out, grid=grid, target=capability(), warps=4, stages=2, constants=constants)
