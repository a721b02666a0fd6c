"""Kernels and number formats for MXFP4 mixture-of-experts layers. Knows arrays, not models or meshes."""

from pallas_kernels.dense import dense_matmul
from pallas_kernels.fp8_block import FP8BlockArray, quantize_fp8_block
from pallas_kernels.grouped_matmul import (
    OUT_FORMATS,
    KernelWeights,
    from_kernel_layout,
    grouped_matmul,
    lay_out,
    low_rank_matmul,
    to_kernel_layout,
)
from pallas_kernels.mxfp4 import MXFP4Array, quantize_mxfp4
from pallas_kernels.mxfp8 import MXFP8Array, TokenScaledArray, quantize_fp8_token, quantize_mxfp8
from pallas_kernels.nvfp4 import dequantize_nvfp4
from pallas_kernels.ordering import after
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.row_spread import spread_rows
from pallas_kernels.select import Explanation, explain
from pallas_kernels.situ import Activation, Situ, SwiGLU, situ_and_mul, swiglu_and_mul
from pallas_kernels.slot_order import RowSchedule, schedule_rows
from pallas_kernels.token_rows import combine_rows, gather_rows
from pallas_kernels.top_k import stable_top_k, top_k_weights

__all__ = [
    "OUT_FORMATS",
    "Activation",
    "Explanation",
    "FP8BlockArray",
    "KernelWeights",
    "MXFP4Array",
    "MXFP8Array",
    "RowSchedule",
    "Situ",
    "SwiGLU",
    "TokenScaledArray",
    "after",
    "combine_rows",
    "dense_matmul",
    "dequantize_nvfp4",
    "explain",
    "from_kernel_layout",
    "gather_rows",
    "grouped_matmul",
    "lay_out",
    "low_rank_matmul",
    "quantize_fp8_block",
    "quantize_fp8_token",
    "quantize_mxfp4",
    "quantize_mxfp8",
    "rms_norm",
    "schedule_rows",
    "situ_and_mul",
    "spread_rows",
    "stable_top_k",
    "swiglu_and_mul",
    "to_kernel_layout",
    "top_k_weights",
]
