"""How much memory a step of healing needs: a bound as a function of the sizes, and what there is to hold it against.

peak < frozen bytes + 16 bytes a trained parameter + activation_bytes(...)

16 bytes: the float32 master weight, AdamW's two moments, and the float32 gradient. Packed experts have none of them.
"""

import math
from typing import Any

import jax
from flax import nnx

from k3jax.config import K3Config
from k3jax.healing.step import trains
from k3jax.mlp import GatedMLP
from k3jax.moe import MoE

BYTES_A_PARAMETER = 16


def state_bytes(layer: GatedMLP | MoE) -> tuple[int, int]:
    """`(frozen, trained)`: bytes that stay as they are, and those of 4 x the trained parameters in float32.

    On one device, which over a mesh holds a part of either.
    """
    _, *states = nnx.split(layer, trains, ...)
    trainable, frozen = states
    return tree_bytes(frozen), BYTES_A_PARAMETER * sum(_size(leaf) for leaf in jax.tree.leaves(trainable))


def activation_bytes(config: K3Config, tokens: int, trained_parameters: int) -> int:
    """What a step over micro-batches of `tokens` needs beside frozen weights and the optimiser's state, at most.

    a parameter   as it was before training, as it is rounded for the layer, and its gradient there: 2 + 2 + 2
    a routed row  kept for the backward pass: latent, activation, output (bfloat16); there: gate and up recomputed and
                  their gradients (2 x 2F in float32, 2 x 2F in bfloat16), the row's and its latent's gradient
    a token       input, target, output and their gradients (D), latents (L), shared gate and up (as above), logits (E)
    """
    experts, width, latent = config.num_experts or 0, config.expert_width, config.latent_size
    shared = config.shared_intermediate_size
    row = 2 * (2 * latent + width) + 2 * width * (4 + 4 + 2 + 2) + latent * (4 + 4)
    token = 40 * config.hidden_size + 40 * latent + 30 * shared + 40 * experts
    return 6 * trained_parameters + tokens * (config.experts_per_token * row + token)


def tree_bytes(tree: object) -> int:
    """The bytes that one device holds of all arrays in a pytree."""
    return sum(_size(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _size(leaf: Any) -> int:
    """Elements on one device; all of them of a shape without values that has no place yet."""
    return leaf.size if leaf.sharding is None else math.prod(leaf.sharding.shard_shape(leaf.shape))


def peak_bytes() -> int | None:
    """The most that the first device has held at once since the process began; None where it does not count."""
    stats = jax.devices()[0].memory_stats()
    return None if stats is None else stats.get("peak_bytes_in_use")
