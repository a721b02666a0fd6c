"""Kernels for the ops that move rows and compute little: gated activations, quantisers, gathers and weighted sums."""

from typing import Any

IMPLEMENTATIONS = ("mosaic", "triton")


def of(implementation: str) -> Any:
    """The module of these kernels, imported when one of them is wanted: that takes a second, and only GPUs need it."""
    if implementation == "mosaic":
        from pallas_kernels.row_kernels import mosaic_rows

        return mosaic_rows
    from pallas_kernels.row_kernels import triton_rows

    return triton_rows


def moves() -> Any:
    """The module of the kernels that gather rows and add them up, imported like the others."""
    from pallas_kernels.row_kernels import triton_moves

    return triton_moves
