"""What each recipe keeps of its weights and activations, for the oracle: one method a place where it rounds."""

from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from k3jax.reference import formats
from k3jax.reference.formats import Bytes, Values

Mode = Literal["oracle", "exact"]

RECIPES = ("bf16", "w4a16", "w4a8", "w4a8_fp8")


@dataclass(frozen=True)
class Numbers:
    """Where a run rounds. In mode "exact", nowhere."""

    recipe: str
    mode: Mode
    dense_weights: str = "bf16"

    def __post_init__(self) -> None:
        if self.recipe not in RECIPES:
            raise ValueError(f"recipe {self.recipe!r} is unknown; the recipes are {', '.join(RECIPES)}")
        if self.mode not in ("oracle", "exact"):
            raise ValueError(f'mode {self.mode!r} is unknown; the modes are "oracle" and "exact"')

    def bf16(self, x: Values) -> Values:
        """A rounding point of the official model."""
        return formats.round_bf16(x) if self.mode == "oracle" else x

    def expert_input(self, rows: Values) -> Values:
        """Rows [S, K] that enter an expert's GEMM, as the recipe's activation format keeps them."""
        if self.mode == "oracle" and self.recipe == "w4a8":
            return formats.through_mxfp8(rows)
        if self.mode == "oracle" and self.recipe == "w4a8_fp8":
            return formats.through_fp8_token(rows)
        return rows

    def plain_weight(self, weight: NDArray[Any]) -> Values:
        """Weights stored in bf16, f16 or f32, as loading keeps them (bf16), in float64."""
        values: Values = weight.astype(np.float64)
        return values if weight.dtype == ml_dtypes.bfloat16 else self.bf16(values)

    def nvfp4_weight(self, codes: Bytes, scales: NDArray[Any], global_scale: NDArray[Any]) -> Values:
        """NVFP4 weights, which loading rounds to bf16."""
        return self.bf16(formats.decode_nvfp4(codes, scales.astype(np.float64), float(global_scale.reshape(()))))

    def dense_weight(self, values: Values) -> Values:
        """Whole blocks of rows of a shared expert, a latent projection or a dense layer, in e4m3 if it is kept so."""
        return formats.through_fp8_block(values) if self.mode == "oracle" and self.dense_weights == "fp8" else values

    def expert_weight(self, values: Values) -> Values:
        """An expert that the checkpoint doesn't store in MXFP4: quantised to it in every recipe but bf16."""
        return formats.through_mxfp4(values) if self.mode == "oracle" and self.recipe != "bf16" else values

    def packed_weight(self, codes: Bytes, scale_bytes: Bytes) -> Values:
        """MXFP4 weights. They are exact in bf16, but for the largest two scales, where they may overflow it."""
        values = formats.decode_mxfp4(codes, scale_bytes)
        return self.bf16(values) if np.any(scale_bytes >= 253) else values
