"""RMSNorm in NumPy and float64, with the official rounding points."""

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike


def require_normed(y: ArrayLike, x: ArrayLike, gain: ArrayLike, eps: float) -> None:
    """Bit for bit, but for the few elements that the last bits of float32 round the other way: they are a step off."""
    x, gain = np.asarray(x).astype(jnp.bfloat16).astype(np.float64), np.asarray(gain).astype(np.float64)
    normed = (x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)).astype(jnp.bfloat16)
    expected = (normed.astype(np.float64) * gain).astype(jnp.bfloat16).astype(np.float64)
    found = np.asarray(y).astype(np.float64)
    np.testing.assert_allclose(found, expected, rtol=2**-6)
    assert ((found == expected) | np.isnan(expected)).mean() >= 0.998
