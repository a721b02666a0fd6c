"""Kernels for the ops that move rows and compute little: gated activations, quantisers, gathers and weighted sums."""

from typing import Any

IMPLEMENTATIONS = ("mosaic", "triton")
MOVES = ("gather_rows", "combine_rows", "after")
ORDERS = ("schedule_rows", "stable_top_k", "top_k_weights")


def of(implementation: str) -> Any:
    """The module of these kernels, imported when one of them is wanted: that takes a second, and only GPUs need it."""
    if implementation == "mosaic":
        from pallas_kernels.row_kernels import mosaic_rows

        return mosaic_rows
    from pallas_kernels.row_kernels import triton_rows

    return triton_rows


def moves(implementation: str) -> Any:
    """The module of the kernels of `MOVES`, imported like the others."""
    if implementation == "mosaic":
        from pallas_kernels.row_kernels import mosaic_moves

        return mosaic_moves
    from pallas_kernels.row_kernels import triton_moves

    return triton_moves


def spreads() -> Any:
    """The module of the one kernel of `spread_rows`, imported like the others."""
    from pallas_kernels.row_kernels import mosaic_spread

    return mosaic_spread


def orders(op: str, implementation: str) -> Any:
    """The module of the kernel of an op of `ORDERS`, imported like the others."""
    if implementation == "mosaic":
        from pallas_kernels.row_kernels import mosaic_orders

        return mosaic_orders
    if op == "schedule_rows":
        from pallas_kernels.row_kernels import triton_schedule

        return triton_schedule
    from pallas_kernels.row_kernels import triton_top_k

    return triton_top_k
