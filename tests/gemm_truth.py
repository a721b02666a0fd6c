"""Activations and grouped products in NumPy and float64, with the rounding points that every implementation has."""

import numpy as np
from numerics import round_bf16

from pallas_kernels import Activation, SwiGLU


def activate(activation: Activation, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """The activation's formula; nothing is rounded."""
    gate, up = gate.astype(np.float64), up.astype(np.float64)
    sigmoid = 1 / (1 + np.exp(-gate))
    if isinstance(activation, SwiGLU):
        return gate * sigmoid * up
    bounded_up = up if activation.linear_beta is None else activation.linear_beta * np.tanh(up / activation.linear_beta)
    return activation.beta * np.tanh(gate / activation.beta) * sigmoid * bounded_up


def activation_slopes(activation: Activation, gate: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Derivatives with respect to gate and up, by central differences good to about 1e-9."""
    gate, up, step = gate.astype(np.float64), up.astype(np.float64), 1e-6
    d_gate = activate(activation, gate + step, up) - activate(activation, gate - step, up)
    d_up = activate(activation, gate, up + step) - activate(activation, gate, up - step)
    return d_gate / (2 * step), d_up / (2 * step)


def grouped_product(
    x: np.ndarray, w: np.ndarray, group_sizes: np.ndarray, activation: Activation | None = None
) -> np.ndarray:
    """`[M, K], [G, N, K], [G]` -> float64 `[sum(group_sizes), N or N/2]`: only the rows that belong to a group.

    Gate and up are rounded to bfloat16 before the activation; the result is not rounded.
    """
    group = np.repeat(np.arange(w.shape[0]), group_sizes)
    h = np.zeros((group.size, w.shape[1]))
    for g in np.unique(group):
        h[group == g] = x[: group.size][group == g] @ w[g].T
    if activation is None:
        return h
    gate, up = np.split(round_bf16(h), 2, axis=1)
    return activate(activation, gate, up)


def grouped_input_gradient(
    x: np.ndarray, w: np.ndarray, group_sizes: np.ndarray, activation: Activation | None, dy: np.ndarray
) -> np.ndarray:
    """The gradient of `sum(dy * y)` for x, float64 `[M, K]`, zero in rows of no group; the factor that multiplies `w`
    is rounded to bfloat16 first, the result is not."""
    used = int(group_sizes.sum())
    dh = dy[:used]
    if activation is not None:
        gate, up = np.split(round_bf16(grouped_product(x, w, group_sizes)), 2, axis=1)
        dh = np.concatenate([slope * dh for slope in activation_slopes(activation, gate, up)], axis=1)
    group = np.repeat(np.arange(w.shape[0]), group_sizes)
    dx = np.zeros(x.shape)
    for g in np.unique(group):
        dx[:used][group == g] = round_bf16(dh[group == g]) @ w[g]
    return dx
