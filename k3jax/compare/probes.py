"""Inputs made to expose what random tokens hide: the activation's whole range, and tokens that barely choose."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from k3jax.compare.differences import Difference, difference, relative_rms
from k3jax.compare.picks import Picks, compare_picks, same_sets
from k3jax.config import K3Config
from k3jax.mlp import GatedMLP
from k3jax.moe import MoE
from k3jax.reference import activation, oracle_trace, round_bf16
from pallas_kernels import Situ

Array = NDArray[Any]

_ROUTER = ("block_sparse_moe.gate.weight", "block_sparse_moe.gate.e_score_correction_bias")
_TOKENS = 32
_CLOSE = (3e-6, 2e-5)
"""By how much the last expert picked beats the first one left out: well above float32's error, far below bfloat16's."""
_HALVINGS = 40
_UNBOUNDED = 8.0  # How far the probe reaches on a branch that no beta bounds.
_LINEAR_POINTS = 65
_SMALLEST_POWER = -20


def activation_grid(config: K3Config) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    """bfloat16 gate and up `[P]`: every pair of a gate in +-2 beta and an up in +-2 linear_beta, evenly spaced ones
    and powers of two down to 2^-20, both signs and zero. Branches without a bound go to +-8.
    """
    kind = config.activation
    beta, linear_beta = (kind.beta, kind.linear_beta) if isinstance(kind, Situ) else (None, None)
    gate, up = np.meshgrid(_points(beta), _points(linear_beta), indexing="ij")
    return gate.reshape(-1), up.reshape(-1)


def probe_activation(layer: GatedMLP | MoE, config: K3Config) -> tuple[Difference, float]:
    """The layer's activation against float64 rounded to bfloat16: over the grid, and its relative error's RMS."""
    gate, up = activation_grid(config)
    ours = np.asarray(_probe(layer, jnp.asarray(gate), jnp.asarray(up)))
    truth = round_bf16(activation(config, gate, up))
    return difference(ours, truth), relative_rms(ours, truth)


def probe_picks(layer: MoE, config: K3Config, tensors: Mapping[str, Array]) -> Picks | None:
    """The layer's picks for tokens on the edge of a decision, against float64; None where there is no such token.

    Among random tokens a bias or a score kept in bfloat16 moves one pick in thousands. Here it moves many.
    """
    x = boundary_tokens(config, tensors)
    if len(x) == 0:
        return None
    ours = np.asarray(_route(layer, jnp.asarray(x)))
    return compare_picks(ours, _float64_picks(config, tensors, x)[0], None, 0.0)


def boundary_tokens(config: K3Config, tensors: Mapping[str, Array]) -> Array:
    """float32 tokens `[at most 32, D]` whose closest decision differs by 3e-6 to 2e-5 in the biased scores.

    Each lies between two random tokens with different picks: halving the way finds where the picks change. Models that
    choose among groups of experts have other edges too, and get no tokens.
    """
    num_experts = config.num_experts or 0
    if config.num_expert_group > config.topk_group or config.experts_per_token >= num_experts:
        return np.zeros((0, config.hidden_size), np.float32)
    near, far = np.random.default_rng(0).standard_normal((2, _TOKENS, config.hidden_size), np.float32)
    picks, gap = _float64_picks(config, tensors, near)
    for _ in range(_HALVINGS):
        searching = gap > _CLOSE[1]
        if not searching.any():
            break
        middle = (near + far) / 2
        middle_picks, middle_gap = _float64_picks(config, tensors, middle)
        alike = same_sets(middle_picks, picks)
        far = np.where((searching & ~alike)[:, None], middle, far)
        near = np.where((searching & alike)[:, None], middle, near)
        gap = np.where(searching & alike, middle_gap, gap)
    return near[(gap >= _CLOSE[0]) & (gap <= _CLOSE[1])]


def _float64_picks(config: K3Config, tensors: Mapping[str, Array], x: Array) -> tuple[Array, Array]:
    """The oracle's picks `[T, X]`, and by how much the worst of them beats the best expert left out `[T]`."""
    router = {name: tensors[name] for name in _ROUTER}
    nowhere = np.full((len(x), config.experts_per_token), -1)
    trace = oracle_trace(config, router, x, recipe="bf16", mode="exact", ids=nowhere)
    best = -np.sort(-trace["expert_scores"], axis=-1)
    last = config.experts_per_token - 1
    return trace["expert_ids"], best[:, last] - best[:, last + 1]


@jax.jit
def _route(layer: MoE, x: jax.Array) -> jax.Array:
    return layer.route(x).ids


@jax.jit
def _probe(layer: GatedMLP | MoE, gate: jax.Array, up: jax.Array) -> jax.Array:
    return layer.activation_probe(gate, up)


def _points(beta: float | None) -> NDArray[np.generic]:
    reach = _UNBOUNDED if beta is None else 2 * beta
    small = 2.0 ** np.arange(_SMALLEST_POWER, np.log2(reach))
    points = np.concatenate([np.linspace(-reach, reach, _LINEAR_POINTS), small, -small])
    return np.unique(points.astype(ml_dtypes.bfloat16))
