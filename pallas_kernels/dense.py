"""`dense_matmul`: rows times one matrix of weights, as projections and shared experts have it."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float

from pallas_kernels import select
from pallas_kernels.fp8_block import FP8BlockArray
from pallas_kernels.rounding import to_bfloat16
from pallas_kernels.situ import Activation, apply_activation

OutFormat = Literal["bf16", "f32"]


@functools.partial(jax.jit, static_argnames=("activation", "out_format", "fine_sums", "implementation"))
def dense_matmul(
    x: Float[Array, "m k"],
    w: Float[Array, "... n k"] | FP8BlockArray,
    *,
    activation: Activation | None = None,
    addend: BFloat16[Array, "m n_all"] | None = None,
    out_format: OutFormat = "bf16",
    fine_sums: bool = False,
    implementation: str | None = None,
) -> Float[Array, "m width"]:
    """`x @ w.T`, accumulated in float32; leading axes of `w` join its rows.

        y = x @ w.reshape(-1, K).T
        if activation:                                          # rows of w: gate, then up
            gate, up = split(round_to_bf16(y), 2)
            y = activation(gate, up)                            # in float32
        if addend:
            y = round_to_bf16(y) + addend                       # in float32

    Args:
        x: `[M, K]`, bfloat16 for a kernel.
        w: `[..., N, K]` (out, in), bfloat16 for a kernel; or an FP8BlockArray, which is copied to bfloat16 (compiled
            for Hopper, XLA copies it for its own product too).
        activation: `Situ(...)`, `SwiGLU()` or None. With one, the rows count gate and up, and it halves the result.
        addend: bfloat16 `[M, N]`, added to the rounded product, of which a kernel stores the sum alone; or None. Only
            without an activation, and to "bf16".
        out_format: "bf16", rounded once (and once more after an addend), or "f32".
        fine_sums: for a result that much depends on, as when it is rounded to eight bits next: "mosaic" then adds up
            1,024 columns at a time, as of few rows anyway; many take a little longer. Others do not change.
        implementation: "reference" (float32 throughout), "xla", "mosaic" (Hopper), or None for the fastest that can.

    Returns:
        `[M, N]`, or `[M, N/2]` with an activation. Differentiable with respect to `x`, `w` and `addend`: behind a
        kernel by the formula of "xla", which computes gate and up once more.

    Raises:
        ValueError: a shape, a dtype or a name is wrong, or nothing can be added to such a result.
        NotImplementedError: the named implementation cannot run this here.
    """
    _check(x, w, activation, out_format)
    _check_addend(addend, x, w, activation, out_format)
    chosen = select.choose("dense_matmul", implementation, x=x, w=w, activation=activation)
    values = (w.dequantize() if isinstance(w, FP8BlockArray) else w).reshape(-1, w.shape[-1])
    if chosen == "mosaic" and x.shape[0]:
        return _mosaic(x, values, addend, activation, out_format, fine_sums)
    return (_reference if chosen == "reference" else _xla)(x, values, addend, activation, out_format)


def _reference(x: Array, w: Array, addend: Array | None, activation: Activation | None, out_format: OutFormat) -> Array:
    wide = jax.lax.Precision.HIGHEST
    sums = jnp.dot(x.astype(jnp.float32), w.astype(jnp.float32).T, precision=wide)
    return _finish(sums, addend, activation, out_format)


def _xla(x: Array, w: Array, addend: Array | None, activation: Activation | None, out_format: OutFormat) -> Array:
    return _finish(jnp.dot(x, w.T, preferred_element_type=jnp.float32), addend, activation, out_format)


def _finish(sums: Array, addend: Array | None, activation: Activation | None, out_format: OutFormat) -> Array:
    if addend is not None:
        return to_bfloat16(to_bfloat16(sums).astype(jnp.float32) + addend.astype(jnp.float32))
    if activation is None:
        return sums if out_format == "f32" else to_bfloat16(sums)
    gate_up = to_bfloat16(sums)
    return apply_activation(activation, gate_up.astype(jnp.float32) if out_format == "f32" else gate_up)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _mosaic(
    x: Array,
    w: Array,
    addend: Array | None,
    activation: Activation | None,
    out_format: OutFormat,
    fine_sums: bool,
) -> Array:
    kernel = functools.partial(_kernel, activation=activation, out_format=out_format, fine_sums=fine_sums)
    return _joining_rows(kernel)(x, w, addend)


def _kernel(x: Array, w: Array, addend: Array | None, **how: Any) -> Array:
    from pallas_kernels.grouped_matmul import mosaic_hopper_dense  # imported when wanted: that takes a second

    rows = jnp.array([x.shape[0]], jnp.int32)
    return mosaic_hopper_dense.grouped_matmul(x, w[None], rows, addend=addend, **how)


def _joining_rows(product: Callable[..., Array]) -> Callable[..., Array]:
    """`product(x, w, addend)`, of which `vmap` over rows alone is one of all rows; over `w` too, they run one by one.

    Rows are x's and the addend's, if there is one.
    """
    batched = jax.custom_batching.custom_vmap(product)

    @batched.def_vmap
    def rule(size: int, in_batch: list[bool | None], x: Array, w: Array, addend: Array | None) -> tuple[Array, bool]:
        if in_batch[1]:
            one = jax.custom_batching.sequential_vmap(batched)
            axes = tuple(0 if each else None for each in in_batch)
            return jax.vmap(one, in_axes=axes, axis_size=size)(x, w, addend), True

        def joined(rows: Array, has_batch: bool | None) -> Array:
            each = rows if has_batch else jnp.broadcast_to(rows, (size, *rows.shape))
            return each.reshape(-1, rows.shape[-1])

        all_added = None if addend is None else joined(addend, in_batch[2])
        y = batched(joined(x, in_batch[0]), w, all_added)
        return y.reshape(size, -1, y.shape[-1]), True

    return batched


def _forward(*arguments: Any) -> tuple[Array, Any]:
    return _mosaic(*arguments), arguments[:3]


def _backward(activation: Activation | None, out_format: OutFormat, fine_sums: bool, residuals: Any, dy: Array) -> Any:
    del fine_sums
    _, pullback = jax.vjp(lambda x, w, addend: _xla(x, w, addend, activation, out_format), *residuals)
    return pullback(dy)


_mosaic.defvjp(_forward, _backward)


def _check(x: Any, w: Any, activation: Activation | None, out_format: str) -> None:
    if x.ndim != 2 or w.ndim < 2 or x.shape[1] != w.shape[-1]:
        raise ValueError(f"dense_matmul: x {x.shape} and w {w.shape} must be [M, K] and [..., N, K] with the same K")
    if out_format not in ("bf16", "f32"):
        raise ValueError(f"dense_matmul: {out_format=} is not one of bf16, f32")
    if activation is not None and math.prod(w.shape[:-1]) % 2:
        raise ValueError(f"dense_matmul: w {w.shape} must have an even N to hold gate and up rows for {activation}")


def _check_addend(addend: Any, x: Any, w: Any, activation: Activation | None, out_format: str) -> None:
    if addend is None:
        return
    if activation is not None or out_format != "bf16":
        raise ValueError(
            f"dense_matmul: an addend goes with neither {activation=} nor {out_format=}, only None and bf16"
        )
    expected = (x.shape[0], math.prod(w.shape[:-1]))
    if addend.shape != expected or addend.dtype != jnp.bfloat16:
        raise ValueError(
            f"dense_matmul: addend {addend.dtype}{addend.shape} must be bfloat16 {expected} for x {x.shape}"
        )
