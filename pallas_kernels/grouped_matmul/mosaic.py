"""Which of Mosaic's kernels multiplies weights: Hopper's for MXFP4 or for bfloat16, or Blackwell's."""

from typing import Any

from pallas_kernels.grouped_matmul import config
from pallas_kernels.grouped_matmul.blackwell import config as blackwell_config
from pallas_kernels.grouped_matmul.kernel_layout import KernelWeights, Mma
from pallas_kernels.triton_call import capability

_BLACKWELL = 100


def here(w: Any) -> Any:
    """The module of this device's kernel of weights like `w`, imported when wanted: that takes a second."""
    if _is_blackwell():
        from pallas_kernels.grouped_matmul import mosaic_blackwell

        return mosaic_blackwell
    if isinstance(w, KernelWeights):
        from pallas_kernels.grouped_matmul import mosaic_hopper

        return mosaic_hopper
    from pallas_kernels.grouped_matmul import mosaic_hopper_dense

    return mosaic_hopper_dense


def require_tunings(groups: int, n: int, k: int, mma: Mma, gated: bool) -> None:
    """Raises NotImplementedError unless the kernel can run weights `[groups, n, k]` for any number of rows."""
    for rows_a_group in (1, 40, 80, 160, 1000):  # from a decode step's to a prefill's: the tunings differ
        rows = rows_a_group * groups
        if _is_blackwell():
            blackwell_config.choose_tuning(rows, groups, n, k, gated)
        else:
            config.choose_tuning(rows, groups, n, k, mma, gated)


def _is_blackwell() -> bool:
    return (capability() or 0) >= _BLACKWELL
