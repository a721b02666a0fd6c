"""`grouped_matmul` in Triton, for every NVIDIA GPU from Ampere on: a program a tile, no table made on the host.

Two kernels. `triton.words` takes MXFP4 weights in the order of `kernel_layout` on sm_80 to sm_90, where codes must be
decoded in registers; `triton.plain` takes weights as they are, bfloat16 or MXFP4, on any of these GPUs, and is what
Blackwell wants, whose tensor cores read MXFP4. In both the weights are the left operand and rows of x the right one.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.kernel_layout import KernelWeights
from pallas_kernels.grouped_matmul.triton.tuning import PlainTuning, WordsTuning, choose_plain, choose_words
from pallas_kernels.mxfp4 import MXFP4Array
from pallas_kernels.mxfp8 import MXFP8Array, TokenScaledArray
from pallas_kernels.situ import Activation, Situ
from pallas_kernels.triton_call import capability, triton_call

Rows = Float[Array, "m k"] | MXFP8Array | TokenScaledArray

_BLACKWELL = 100
_LEAST = 80


def grouped_matmul(
    x: Rows,
    w: Float[Array, "g n k"] | MXFP4Array | KernelWeights,
    group_sizes: Int[Array, " g"],
    *,
    activation: Activation | None,
    dtype: jnp.dtype,
    tuning: WordsTuning | PlainTuning | None = None,
    target: int | None = None,
) -> Float[Array, "m width"]:
    """`x[m] @ w[g].T` for every row m of group g, in float32, rounded to `dtype`; with an activation of it.

    Args:
        x: `[M, K]`: bfloat16, MXFP8 or e4m3 with a scale a token. On Blackwell MXFP4 weights meet eight-bit rows as
            they are; elsewhere the rows are made bfloat16 first, exactly.
        w: `[G, N, K]`: bfloat16, `MXFP4Array`, or from `to_kernel_layout(..., gated=activation is not None)`.
        group_sizes: int32 `[G]`, `sum(group_sizes) <= M`; read on the device only.
        activation: a compile-time choice: `Situ(...)`, `SwiGLU()` or None.
        tuning: None for `choose_words`' or `choose_plain`'s.
        target: the compute capability to compile for, as 80 or 90; None for the device's.

    Returns:
        `[M, N]`, or `[M, N/2]` with an activation. Rows at and beyond `sum(group_sizes)` are unspecified.

    Raises:
        NotImplementedError: `why_not` says so.
    """
    target = target or capability() or _LEAST
    reason = why_not(x, w, activation, target)
    if reason is not None:
        raise NotImplementedError(f"grouped_matmul in Triton: {reason}")
    width = w.shape[1] // (2 if activation else 1)
    out = jax.ShapeDtypeStruct((x.shape[0], width), dtype)
    if isinstance(w, KernelWeights):
        assert tuning is None or isinstance(tuning, WordsTuning)
        return _with_words(x, w, group_sizes, activation, out, tuning, target)
    assert tuning is None or isinstance(tuning, PlainTuning)
    return _with_plain(x, w, group_sizes, activation, out, tuning, target)


def why_not(x: Any, w: Any, activation: Activation | None, target: int | None = None) -> str | None:
    """Why `grouped_matmul` cannot take these arguments on a GPU of this compute capability; None if it can."""
    target = target or capability() or _LEAST
    if not isinstance(x, MXFP8Array | TokenScaledArray) and x.dtype != jnp.bfloat16:
        return f"x is {x.dtype}; bfloat16 is needed"
    if not isinstance(w, KernelWeights):
        return None
    if target >= _BLACKWELL:
        return "the weights are laid out for GPUs before Blackwell (from_kernel_layout gives them back)"
    if w.mma != "bf16":
        return f"the weights are laid out for {w.mma} products, which only mosaic has"
    if w.gated != (activation is not None):
        return f"weights laid out with gated={w.gated} do not fit activation={activation}"
    return None


def temporary_bytes(x: Rows, w: Any, target: int) -> int:
    """What a call needs beside its operands and its result: eight-bit rows as bfloat16, where it multiplies those."""
    eight_bits = isinstance(x, MXFP8Array | TokenScaledArray)
    return 2 * x.shape[0] * x.shape[1] if eight_bits and not _takes_eight_bits(w, target) else 0


def _takes_eight_bits(w: Any, target: int) -> bool:
    return target >= _BLACKWELL and isinstance(w, MXFP4Array)


def _with_words(
    x: Rows,
    w: KernelWeights,
    group_sizes: Array,
    activation: Activation | None,
    out: jax.ShapeDtypeStruct,
    tuning: WordsTuning | None,
    target: int,
) -> Array:
    from pallas_kernels.grouped_matmul.triton.words import grouped_matmul_words

    rows, scales = _as_bf16(x)
    (m, k), (groups, n, _) = rows.shape, w.shape
    used = tuning or choose_words(m, groups, n, k, target)
    return triton_call(
        grouped_matmul_words,
        rows,
        w.words,
        group_sizes,
        w.exponents,
        w.exponents if scales is None else scales,
        out=out,
        grid=(_row_tiles(m, groups, used.width) * (n // (64 * used.units)),),
        target=target,
        warps=used.warps,
        stages=used.stages,
        constants={
            "M": m,
            "N": n,
            "K": k,
            "GROUPS": groups,
            "PADDED_GROUPS": _padded(groups),
            "UNITS": used.units,
            "K_UNITS": used.k_units,
            "WIDE": used.wide,
            "NARROW": used.narrow,
            "SCALED": scales is not None,
            **activation_constants(activation),
        },
    )


def _with_plain(
    x: Rows,
    w: Array | MXFP4Array,
    group_sizes: Array,
    activation: Activation | None,
    out: jax.ShapeDtypeStruct,
    tuning: PlainTuning | None,
    target: int,
) -> Array:
    from pallas_kernels.grouped_matmul.triton.plain import BF16, E4M3, TOKEN, grouped_matmul_plain

    packed = isinstance(w, MXFP4Array)
    kind = TOKEN if isinstance(x, TokenScaledArray) else BF16
    scales: Array | None
    if isinstance(x, MXFP8Array) and _takes_eight_bits(w, target):
        rows, scales, kind = x.values, x.scales, E4M3
    elif isinstance(x, TokenScaledArray) and _takes_eight_bits(w, target):
        rows, scales = x.values, x.scales
    else:
        rows, scales = _as_bf16(x)
    (m, k), groups = rows.shape, w.shape[0]
    used = tuning or choose_plain(m, groups, packed, target, activation is not None)
    values, value_scales = (w.codes, w.scales) if isinstance(w, MXFP4Array) else (w, group_sizes)
    return triton_call(
        grouped_matmul_plain,
        rows,
        group_sizes if scales is None else scales,
        values,
        value_scales,
        group_sizes,
        out=out,
        grid=(_row_tiles(m, groups, used.width) * -(-out.shape[1] // used.block),),
        target=target,
        warps=used.warps,
        stages=used.stages,
        constants={
            "M": m,
            "COLUMNS": out.shape[1],
            "K": k,
            "GROUPS": groups,
            "PADDED_GROUPS": _padded(groups),
            "BLOCK": used.block,
            "BLOCK_K": used.block_k,
            "WIDTH": used.width,
            "PACKED": packed,
            "ROWS": kind.value,
            **activation_constants(activation),
        },
    )


def activation_constants(activation: Activation | None) -> dict[str, Any]:
    """The activation as the kernels' compile-time constants."""
    from pallas_kernels.grouped_matmul.triton import epilogue

    if activation is None:
        return {"ACTIVATION": epilogue.NONE.value, "BETA": 1.0, "LINEAR_BETA": 1.0}
    if not isinstance(activation, Situ):
        return {"ACTIVATION": epilogue.SWIGLU.value, "BETA": 1.0, "LINEAR_BETA": 1.0}
    kind = epilogue.SITU_PLAIN_UP if activation.linear_beta is None else epilogue.SITU
    linear_beta = 1.0 if activation.linear_beta is None else float(activation.linear_beta)
    return {"ACTIVATION": kind.value, "BETA": float(activation.beta), "LINEAR_BETA": linear_beta}


def _as_bf16(x: Rows) -> tuple[Array, Array | None]:
    """The rows as bfloat16, exactly, and float32 `[M]` scales of them or None."""
    if isinstance(x, TokenScaledArray):
        return x.values.astype(jnp.bfloat16), x.scales[:, 0]
    return (x.dequantize(jnp.bfloat16) if isinstance(x, MXFP8Array) else x), None


def _row_tiles(rows: int, groups: int, width: int) -> int:
    """The most row tiles there can be, however the rows fall on the groups."""
    return min(groups, rows) + rows // width


def _padded(groups: int) -> int:
    return max(16, 1 << max(groups - 1, 0).bit_length())
