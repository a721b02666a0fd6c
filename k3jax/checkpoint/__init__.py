"""Checkpoint folders: reading them strictly, and writing synthetic ones in the release's layout."""

from k3jax.checkpoint.folder import CONFIG, INDEX, SINGLE, Checkpoint
from k3jax.checkpoint.layer_tensors import LayerTensors

__all__ = ["CONFIG", "INDEX", "SINGLE", "Checkpoint", "LayerTensors"]
