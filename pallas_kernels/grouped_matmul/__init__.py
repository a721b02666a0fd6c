"""`grouped_matmul`: each group of consecutive rows times that group's weights, with the activation fused in."""

from pallas_kernels.grouped_matmul.api import OUT_FORMATS, grouped_matmul
from pallas_kernels.grouped_matmul.kernel_layout import KernelWeights, from_kernel_layout, to_kernel_layout
from pallas_kernels.grouped_matmul.low_rank import low_rank_matmul
from pallas_kernels.grouped_matmul.placement import lay_out

__all__ = [
    "OUT_FORMATS",
    "KernelWeights",
    "from_kernel_layout",
    "grouped_matmul",
    "lay_out",
    "low_rank_matmul",
    "to_kernel_layout",
]
