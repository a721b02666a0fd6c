"""Inputs made to expose what random tokens hide: the activation over its whole range, and near zero."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from k3jax.config import K3Config
from k3jax.differences import Difference, difference, relative_rms
from k3jax.mlp import GatedMLP
from k3jax.moe import MoE
from k3jax.reference import activation, round_bf16
from pallas_kernels import Situ

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


@jax.jit
def _probe(layer: GatedMLP | MoE, gate: jax.Array, up: jax.Array) -> jax.Array:
    return layer.activation_probe(gate, up)


def _points(beta: float | None) -> NDArray[np.generic]:
    reach = _UNBOUNDED if beta is None else 2 * beta
    small = 2.0 ** np.arange(_SMALLEST_POWER, np.log2(reach))
    points = np.concatenate([np.linspace(-reach, reach, _LINEAR_POINTS), small, -small])
    return np.unique(points.astype(ml_dtypes.bfloat16))
