"""`grouped_matmul`: each group of consecutive rows times that group's weights, with the activation fused in."""

from pallas_kernels.grouped_matmul.api import OUT_FORMATS, grouped_matmul

__all__ = ["OUT_FORMATS", "grouped_matmul"]
