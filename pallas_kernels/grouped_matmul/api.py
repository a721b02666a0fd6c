"""The public `grouped_matmul`: checks its arguments, picks an implementation, and defines the gradient once for all."""

import functools
import typing
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import select
from pallas_kernels.grouped_matmul import mosaic, reference, xla
from pallas_kernels.grouped_matmul.kernel_layout import KernelWeights, from_kernel_layout
from pallas_kernels.mxfp4 import MXFP4Array
from pallas_kernels.mxfp8 import MXFP8Array, TokenScaledArray, quantize_fp8_token, quantize_mxfp8
from pallas_kernels.situ import Activation, apply_activation

Rows = Float[Array, "m k"] | MXFP8Array | TokenScaledArray
Result = Float[Array, "m width"] | MXFP8Array | TokenScaledArray
Weights = Float[Array, "g n k"] | MXFP4Array | KernelWeights
OUT_FORMATS = ("bf16", "f32", "mxfp8", "fp8_token")
_PLAIN = {"reference": reference, "xla": xla}


@typing.overload
def grouped_matmul(
    x: Rows,
    w: Weights,
    group_sizes: Int[Array, " g"],
    *,
    activation: Activation | None = None,
    out_format: Literal["bf16", "f32"] = "bf16",
    implementation: str | None = None,
) -> Array: ...


@typing.overload
def grouped_matmul(
    x: Rows,
    w: Weights,
    group_sizes: Int[Array, " g"],
    *,
    activation: Activation | None = None,
    out_format: str,
    implementation: str | None = None,
) -> Result: ...


@functools.partial(jax.jit, static_argnames=("activation", "out_format", "implementation"))
def grouped_matmul(
    x: Rows,
    w: Weights,
    group_sizes: Int[Array, " g"],
    *,
    activation: Activation | None = None,
    out_format: str = "bf16",
    implementation: str | None = None,
) -> Result:
    """Row m of the result is `x[m] @ w[g].T`, where g is the group that row m falls into.

        start = 0
        for g in range(G):
            rows = slice(start, start + group_sizes[g])
            y[rows] = x[rows] @ w[g].T                          # accumulated in float32
            if activation:                                      # rows of w[g]: gate, then up
                gate, up = split(round_to_bf16(y[rows]), 2)
                y[rows] = activation(gate, up)                  # in float32
            start = rows.stop

    Args:
        x: `[M, K]`: bfloat16, `MXFP8Array` (its block scales applied before the product) or `TokenScaledArray` (its
            token scale applied to the float32 sum). The products are exact in float32.
        w: `[G, N, K]`: bfloat16, `MXFP4Array`, or `KernelWeights` that `to_kernel_layout` made for one implementation.
        group_sizes: integers `[G]`, non-negative, `sum(group_sizes) <= M`; may be empty groups; known at run time only.
        activation: `Situ(...)`, `SwiGLU()` or None. With one, N counts gate and up and the result is `[M, N/2]`.
        out_format: "bf16", "f32", or "mxfp8" / "fp8_token": rounded to bfloat16 and then quantised.
        implementation: "reference", "xla", "triton" (NVIDIA GPUs from Ampere on), "mosaic" (Hopper; Blackwell for
            bfloat16 rows; `KernelWeights`, and on Hopper bfloat16 weights), or None for the fastest that can.

    Returns:
        `[M, N]` or `[M, N/2]` in `out_format`. Rows at and beyond `sum(group_sizes)` are unspecified, and those of `x`
        may hold anything. Differentiable with respect to a bfloat16 `x`, for out_format "bf16" and "f32".

    Raises:
        ValueError: a shape, dtype or name is wrong.
        NotImplementedError: the named implementation cannot run this; or a gradient is asked for with respect to `w`
            (experts are frozen), to a quantised `x`, or through a quantised result.
    """
    _check(x, w, group_sizes, activation, out_format)
    group_sizes = group_sizes.astype(jnp.int32)  # sums of narrower ones would overflow
    chosen = select.choose("grouped_matmul", implementation, x=x, w=w, activation=activation)
    if x.shape[0] == 0:
        width = w.shape[1] // (2 if activation else 1)
        return _finish(jnp.zeros((0, width), _product_dtype(out_format)), out_format, "xla")
    return _grouped_matmul(x, w, group_sizes, activation, out_format, chosen)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _grouped_matmul(
    x: Rows, w: Weights, group_sizes: Array, activation: Activation | None, out_format: str, implementation: str
) -> Result:
    if implementation == "mosaic":
        return _batched(_mosaic, activation, out_format)(x, w, group_sizes)
    forward = _triton if implementation == "triton" else _PLAIN[implementation].forward
    y = _batched(forward, activation, _product_dtype(out_format))(x, w, group_sizes)
    return _finish(y, out_format, implementation)


def _mosaic(x: Rows, w: Any, group_sizes: Array, activation: Activation | None, out_format: str) -> Result:
    # A token's scale needs its whole row, which is the work of many blocks: its quantiser is a kernel of its own. The
    # kernel of bfloat16 weights has no quantiser, because a block of 32 columns may lie in two of its tiles.
    apart = ("fp8_token",) if isinstance(w, KernelWeights) else ("fp8_token", "mxfp8")
    written: Any = "bf16" if out_format in apart else out_format
    y: Any = mosaic.here(w).grouped_matmul(x, w, group_sizes, activation=activation, out_format=written)
    return _finish(y, out_format, None) if out_format in apart else y


def _triton(x: Rows, w: Any, group_sizes: Array, activation: Activation | None, dtype: jnp.dtype) -> Array:
    from pallas_kernels.grouped_matmul import triton_gemm

    return triton_gemm.grouped_matmul(x, w, group_sizes, activation=activation, dtype=dtype)


def _forward(x: Any, w: Any, group_sizes: Any, activation: Any, out_format: str, implementation: str) -> Any:
    """custom_vjp's forward rule; with symbolic zeros each leaf says whether it is being differentiated."""
    if any(leaf.perturbed for leaf in jax.tree.leaves(w)):
        raise NotImplementedError("grouped_matmul has no gradient with respect to w: experts are frozen")
    if isinstance(x, MXFP8Array | TokenScaledArray) and any(leaf.perturbed for leaf in jax.tree.leaves(x)):
        raise NotImplementedError("grouped_matmul has no gradient with respect to a quantised x; pass bfloat16 rows")
    if out_format not in ("bf16", "f32") and any(leaf.perturbed for leaf in jax.tree.leaves(x)):
        raise NotImplementedError(f"grouped_matmul has no gradient through {out_format=}: ask for 'bf16' or 'f32'")
    x, w, group_sizes = jax.tree.map(lambda leaf: leaf.value, (x, w, group_sizes))
    return _grouped_matmul(x, w, group_sizes, activation, out_format, implementation), (x, w, group_sizes)


def _backward(activation: Any, out_format: str, implementation: str, residuals: Any, dy: Any) -> Any:
    """`dx = dh @ w[g]`, where `dh` is `dy` taken back through the activation at the recomputed gate and up."""
    x, w, group_sizes = residuals
    if isinstance(dy, jax.custom_derivatives.SymbolicZero):
        return None, None, None
    if isinstance(x, MXFP8Array | TokenScaledArray):
        return None, None, None  # never asked for: `_forward` refuses
    w = from_kernel_layout(w) if isinstance(w, KernelWeights) else w
    implementation = implementation if implementation in _PLAIN else "xla"
    if activation is not None:
        gate_up: Any = _grouped_matmul(x, w, group_sizes, None, "bf16", implementation)
        _, pullback = jax.vjp(lambda h: apply_activation(activation, h), gate_up.astype(jnp.float32))
        (dy,) = pullback(dy.astype(jnp.float32))
    dx = _batched(_PLAIN[implementation].transposed)(dy.astype(jnp.bfloat16), w, group_sizes)
    return dx.astype(x.dtype), None, None


_grouped_matmul.defvjp(_forward, _backward, symbolic_zeros=True)


def _batched(function: Any, *static: Any) -> Any:
    """`function(x, w, group_sizes, *static)`; `vmap` runs it once for each element of the batch.

    Group sizes differ from element to element, so a batched loop would do every element's work for all of them.
    """
    return jax.custom_batching.sequential_vmap(lambda x, w, group_sizes: function(x, w, group_sizes, *static))


def _product_dtype(out_format: str) -> jnp.dtype:
    return jnp.dtype(jnp.float32 if out_format == "f32" else jnp.bfloat16)


def _finish(y: Array, out_format: str, implementation: str | None) -> Result:
    if out_format == "mxfp8":
        return quantize_mxfp8(y, implementation=implementation)
    return quantize_fp8_token(y, implementation=implementation) if out_format == "fp8_token" else y


def _check(x: Rows, w: Weights, group_sizes: Array, activation: Activation | None, out_format: str) -> None:
    if x.ndim != 2 or len(w.shape) != 3 or x.shape[1] != w.shape[2]:
        raise ValueError(f"grouped_matmul: x {x.shape} and w {w.shape} must be [M, K] and [G, N, K] with the same K")
    for name, operand in (("x", x), ("w", w)):
        if isinstance(operand, MXFP4Array | KernelWeights | MXFP8Array | TokenScaledArray):
            continue
        if operand.dtype != jnp.bfloat16:
            raise ValueError(f"grouped_matmul: {name} is {operand.dtype}; cast it to bfloat16, or quantise it")
    if group_sizes.shape != (w.shape[0],) or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"grouped_matmul: group_sizes must be integers [{w.shape[0]}], one for each of w's groups, "
            f"not {group_sizes.dtype}{list(group_sizes.shape)}"
        )
    if out_format not in OUT_FORMATS:
        raise ValueError(f"grouped_matmul: {out_format=} is not one of {', '.join(OUT_FORMATS)}")
    if activation is not None and w.shape[1] % 2:
        raise ValueError(f"grouped_matmul: w {w.shape} must have an even N to hold gate and up rows for {activation}")
    if out_format == "mxfp8" and w.shape[1] // (2 if activation else 1) % 32:
        raise ValueError(f"grouped_matmul: the width of an 'mxfp8' result must be a multiple of 32; w is {w.shape}")
