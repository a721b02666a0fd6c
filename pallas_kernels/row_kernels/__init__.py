"""Kernels for the ops that move rows and compute little: gated activations and quantisers."""

from typing import Any

IMPLEMENTATIONS = ("mosaic", "triton")


def of(implementation: str) -> Any:
    """The module of these kernels, imported when one of them is wanted: that takes a second, and only GPUs need it."""
    if implementation == "mosaic":
        from pallas_kernels.row_kernels import mosaic_rows

        return mosaic_rows
    from pallas_kernels.row_kernels import triton_rows

    return triton_rows
