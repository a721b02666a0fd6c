"""From layers back to files: `save_layer` and `save_layers` in the Hugging Face layout, `save_adapters` apart."""

from k3jax.saving.adapters_file import load_adapters, save_adapters
from k3jax.saving.folder import save_layer, save_layers

__all__ = ["load_adapters", "save_adapters", "save_layer", "save_layers"]
