"""Kimi K3's MLP and mixture-of-experts layers in JAX, straight from the released checkpoint."""

from k3jax.checkpoint.synthetic import default_checkpoint
from k3jax.config import K3Config
from k3jax.loading import LoadOptions, load_layer
from k3jax.mlp import GatedMLP
from k3jax.moe import MoE, MoEArrays
from k3jax.routing import ExpertLoad, Routing, expert_load

__all__ = [
    "ExpertLoad",
    "GatedMLP",
    "K3Config",
    "LoadOptions",
    "MoE",
    "MoEArrays",
    "Routing",
    "default_checkpoint",
    "expert_load",
    "load_layer",
]
