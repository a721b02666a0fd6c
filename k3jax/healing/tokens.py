"""Synthetic tokens with structure: clusters of unequal size, each near a few directions of its own.

Unit-normal tokens use all of a layer evenly, so that what a cut expert did is lost. A model's hidden states do not:
they lie near a space of few dimensions and prefer some experts, which is what cutting and healing live on.
"""

import ml_dtypes
import numpy as np

_CENTRE, _SPREAD, _NOISE = 0.98, 0.2, 0.02  # shares of a token's size; their squares add up to about one


def structured_tokens(
    count: int, hidden_size: int, *, seed: int, stream: int = 0, clusters: int = 16, rank: int = 4
) -> np.ndarray:
    """bfloat16 `[count, hidden_size]` of unit variance; `stream` draws others of the same structure.

    token = 0.98 centre[c] + 0.2 basis[c] z + 0.02 noise      c: cluster of share 1, 1/2, 1/3, ...; z: `rank` normals
    """
    structure = np.random.default_rng([seed, 0])
    centres = structure.standard_normal((clusters, hidden_size), np.float32)
    bases = structure.standard_normal((clusters, rank, hidden_size), np.float32) / np.float32(np.sqrt(rank))
    draws = np.random.default_rng([seed, 1, stream])
    shares = 1 / np.arange(1, clusters + 1)
    cluster = draws.choice(clusters, count, p=shares / shares.sum())
    z = draws.standard_normal((count, rank), np.float32)
    tokens = _CENTRE * centres[cluster] + _NOISE * draws.standard_normal((count, hidden_size), np.float32)
    for c in range(clusters):
        tokens[cluster == c] += np.float32(_SPREAD) * (z[cluster == c] @ bases[c])
    return tokens.astype(ml_dtypes.bfloat16)
