"""Load time: gives weights the layout that the implementation which will run them wants."""

import logging

import jax
import numpy as np
from jaxtyping import Array

from pallas_kernels import select
from pallas_kernels.grouped_matmul import mosaic
from pallas_kernels.grouped_matmul.kernel_layout import RECIPES, SPANS, KernelWeights, to_kernel_layout
from pallas_kernels.grouped_matmul.narrowing import narrow
from pallas_kernels.mxfp4 import MXFP4Array
from pallas_kernels.triton_call import capability

_log = logging.getLogger("pallas_kernels")

# Layouts by recipe, the fastest first: weights whose exponents span more than e4m3 products hold exactly, or whose K
# they cannot cut, are multiplied as bfloat16, which is exact for rows in e4m3 too.
_LAYOUTS = {"w4a16": ("w4a16",), "w4a8": ("w4a8",), "w4a8_fp8": ("w4a8_fp8", "w4a16")}


def lay_out(
    w: Array | MXFP4Array | KernelWeights,
    *,
    recipe: str,
    gated: bool,
    implementation: str | None = None,
    allow_inexact: bool = False,
    first_expert: int = 0,
) -> Array | MXFP4Array | KernelWeights:
    """`w [G, N, K]` for `grouped_matmul(..., implementation=implementation)` on this device.

    MXFP4 weights are re-laid out, exactly, for a GPU's kernels: on Blackwell for mosaic's recipes only, since triton
    reads them there as they are. Everything else stays as it is. Where the kernels cannot hold these weights,
    `implementation=None` leaves them as they are and logs why.

    Args:
        recipe: "w4a16", "w4a8" or "w4a8_fp8" for MXFP4 weights; "bf16" ones are never re-laid out.
        gated: N counts gate rows and then up rows, for a fused activation.
        allow_inexact: where an expert's exponents span more than the kernel holds, round its smallest blocks to what it
            does, and log a warning of how much is lost.
        first_expert: the number of the first one, by which messages name experts.

    Raises:
        NotImplementedError: "mosaic" was asked for and cannot run here, or cannot hold these weights (the message names
            the expert).
    """
    if implementation not in (None, "mosaic", "triton") or isinstance(w, KernelWeights):
        return w
    if not isinstance(w, MXFP4Array):
        reason = select.why_not_on_gpu("mosaic", "bf16") if implementation == "mosaic" else None
        if reason is not None:
            raise NotImplementedError(f"grouped_matmul cannot run on implementation 'mosaic': {reason}")
        return w
    kernels = implementation or ("triton" if select.why_not_on_gpu("mosaic", recipe) else "mosaic")
    reason = _why_not_laid_out(kernels, recipe)
    if reason is None:
        # triton multiplies as bfloat16 whatever the rows.
        layouts = _LAYOUTS[recipe] if kernels == "mosaic" else ("w4a16",)
        for layout in layouts:
            try:
                if kernels == "mosaic":
                    groups, n, k = w.shape
                    mosaic.require_tunings(groups, n, k, RECIPES[layout], gated)
                has_values = not isinstance(w.codes, jax.ShapeDtypeStruct)
                rounds = allow_inexact and has_values and layout == layouts[-1]
                narrowed = _narrowed(w, layout, first_expert) if rounds else w
                return to_kernel_layout(narrowed, recipe=layout, gated=gated, first_expert=first_expert)
            except NotImplementedError as error:
                reason = str(error)
                what = f"{RECIPES[layout]} products of {recipe}"
                _log.info("grouped_matmul cannot re-lay weights %s out for %s's %s: %s", w.shape, kernels, what, reason)
    if implementation == "mosaic":
        raise NotImplementedError(f"grouped_matmul cannot run on implementation 'mosaic': {reason}")
    return w


def _why_not_laid_out(kernels: str, recipe: str) -> str | None:
    """Why MXFP4 weights stay as they are, for kernels that can or cannot run here."""
    reason = select.why_not_on_gpu(kernels, recipe)
    if reason is None and kernels == "triton" and (capability() or 0) >= 100:
        return "Blackwell's tensor cores read MXFP4 as it is"
    return reason


def _narrowed(w: MXFP4Array, recipe: str, first_expert: int) -> MXFP4Array:
    narrowed, changed, lost = narrow(w, span=SPANS[RECIPES[recipe]])
    experts = np.flatnonzero(np.asarray(changed))
    if not experts.size:
        return narrowed
    worst = int(experts[np.argmax(np.asarray(lost)[experts])])
    _log.warning(
        "%d of %d experts have more exponents than mosaic holds and were rounded; the worst, expert %d, by a relative "
        "L2 error of %.1e",
        experts.size,
        len(lost),
        first_expert + worst,
        float(lost[worst]),
    )
    return narrowed
