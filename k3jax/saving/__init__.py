"""From layers back to a checkpoint folder in the Hugging Face layout: `save_layer`, `save_layers`."""

from k3jax.saving.folder import save_layer, save_layers

__all__ = ["save_layer", "save_layers"]
