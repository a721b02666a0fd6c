"""Load time: gives weights the layout that the implementation which will run them wants."""

import logging

import numpy as np
from jaxtyping import Array

from pallas_kernels import select
from pallas_kernels.grouped_matmul.config import choose_tuning
from pallas_kernels.grouped_matmul.kernel_layout import RECIPES, SPANS, KernelWeights, to_kernel_layout
from pallas_kernels.grouped_matmul.narrowing import narrow
from pallas_kernels.mxfp4 import MXFP4Array
from pallas_kernels.triton_call import capability

_log = logging.getLogger("pallas_kernels")

# Hopper's fp8 tensor cores add up in fewer bits than float32. Over K = 3584 a product is off by 2.5e-3, and at the real
# widths the experts' sum by 9.6e-3, since rounding the hidden rows to e4m3 amplifies it: beyond the recipe's 6e-3. So
# rows in e4m3 are multiplied as bfloat16, exactly. to_kernel_layout(recipe="w4a8_fp8") gives e4m3 products if wanted.
_PRODUCTS = {"w4a16": "w4a16", "w4a8": "w4a8", "w4a8_fp8": "w4a16"}


def lay_out(
    w: Array | MXFP4Array | KernelWeights,
    *,
    recipe: str,
    gated: bool,
    implementation: str | None = None,
    allow_inexact: bool = False,
) -> Array | MXFP4Array | KernelWeights:
    """`w [G, N, K]` for `grouped_matmul(..., implementation=implementation)` on this device.

    MXFP4 weights on a GPU before Blackwell are re-laid out for its kernels, exactly; everything else stays as it is.
    Where they cannot hold these weights, `implementation=None` leaves them as they are and logs why.

    Args:
        recipe: "w4a16", "w4a8" or "w4a8_fp8" for MXFP4 weights; "bf16" ones are never re-laid out.
        gated: N counts gate rows and then up rows, for a fused activation.
        allow_inexact: where an expert's exponents span more than the kernel holds, round its smallest blocks to what it
            does, and log a warning of how much is lost.

    Raises:
        NotImplementedError: "mosaic" was asked for and cannot run here, or cannot hold these weights (the message names
            the expert).
    """
    if implementation not in (None, "mosaic", "triton") or isinstance(w, KernelWeights):
        return w
    kernels = implementation or ("triton" if select.why_not_on_gpu("mosaic", None) else "mosaic")
    reason = _why_not_laid_out(w, kernels)
    if reason is None:
        assert isinstance(w, MXFP4Array)
        # triton multiplies as bfloat16 whatever the rows.
        products = _PRODUCTS[recipe] if kernels == "mosaic" else "w4a16"
        try:
            if kernels == "mosaic":
                _require_tunings(w, products, gated)
            return to_kernel_layout(_narrowed(w, products) if allow_inexact else w, recipe=products, gated=gated)
        except NotImplementedError as error:
            reason = str(error)
            _log.info("grouped_matmul cannot re-lay %s weights %s out for %s: %s", recipe, w.shape, kernels, reason)
    if implementation == "mosaic":
        raise NotImplementedError(f"grouped_matmul cannot run on implementation 'mosaic': {reason}")
    return w


def _why_not_laid_out(w: Array | MXFP4Array, kernels: str) -> str | None:
    """Why weights stay as they are, for kernels that can or cannot run here."""
    if not isinstance(w, MXFP4Array):
        return "its weights are MXFP4, and these are not"
    reason = select.why_not_on_gpu(kernels, None)
    if reason is None and kernels == "triton" and (capability() or 0) >= 100:
        return "Blackwell's tensor cores read MXFP4 as it is"
    return reason


def _require_tunings(w: MXFP4Array, recipe: str, gated: bool) -> None:
    """Raises NotImplementedError unless the kernel can run these weights for any number of rows."""
    groups, n, k = w.shape
    for rows_a_group in (1, 40, 80, 160, 1000):  # from a decode step's to a prefill's: the tunings differ
        choose_tuning(rows_a_group * groups, groups, n, k, RECIPES[recipe], gated)


def _narrowed(w: MXFP4Array, recipe: str) -> MXFP4Array:
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
        worst,
        float(lost[worst]),
    )
    return narrowed
