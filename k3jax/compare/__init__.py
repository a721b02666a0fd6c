"""Comparing a layer with a truth, stage by stage: the oracle, or what another engine computed."""

from k3jax.compare.capture import Capture
from k3jax.compare.layer import LayerComparison, StageResult, compare_layer

__all__ = ["Capture", "LayerComparison", "StageResult", "compare_layer"]
