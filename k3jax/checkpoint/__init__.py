"""Checkpoint folders: reading them strictly, and writing synthetic ones in the release's layout."""

from k3jax.checkpoint.folder import CONFIG, INDEX, SINGLE, Checkpoint, LayerTensors

__all__ = ["CONFIG", "INDEX", "SINGLE", "Checkpoint", "LayerTensors"]
