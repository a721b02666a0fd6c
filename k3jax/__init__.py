"""Kimi K3's MLP and mixture-of-experts layers in JAX, straight from the released checkpoint."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3jax.checkpoint.synthetic import default_checkpoint
    from k3jax.compiling import compiler_options, pad_tokens
    from k3jax.config import K3Config
    from k3jax.loading import load_layer, load_layers
    from k3jax.mlp import GatedMLP
    from k3jax.moe import MoE
    from k3jax.moe_arrays import MoEArrays
    from k3jax.options import LoadOptions
    from k3jax.routing import ExpertLoad, Routing, expert_load
    from k3jax.saving import save_layer, save_layers

__all__ = [
    "ExpertLoad",
    "GatedMLP",
    "K3Config",
    "LoadOptions",
    "MoE",
    "MoEArrays",
    "Routing",
    "compiler_options",
    "default_checkpoint",
    "expert_load",
    "load_layer",
    "load_layers",
    "pad_tokens",
    "save_layer",
    "save_layers",
]

# Imported at first use: `k3jax --help` need not wait three seconds for JAX and Flax.
_HOMES = {
    "ExpertLoad": "k3jax.routing",
    "GatedMLP": "k3jax.mlp",
    "K3Config": "k3jax.config",
    "LoadOptions": "k3jax.options",
    "MoE": "k3jax.moe",
    "MoEArrays": "k3jax.moe_arrays",
    "Routing": "k3jax.routing",
    "compiler_options": "k3jax.compiling",
    "default_checkpoint": "k3jax.checkpoint.synthetic",
    "expert_load": "k3jax.routing",
    "load_layer": "k3jax.loading",
    "load_layers": "k3jax.loading",
    "pad_tokens": "k3jax.compiling",
    "save_layer": "k3jax.saving",
    "save_layers": "k3jax.saving",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'k3jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
