"""Working on a bounded number of tokens at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def in_chunks(function: Callable[..., Any], most: int | None, *arrays: Array) -> Any:
    """`function(*arrays)` for arrays `[T, ...]`, whose results begin with T too, over at most `most` tokens at a time.

    Chunks run one after another, so that their buffers are needed once; the gradient computes each chunk again rather
    than keep what it needs of all. `most=None` is the whole at once. Tokens are added to make chunks equal: zeros, and
    -1 in integer arrays.
    """
    count = arrays[0].shape[0]
    if most is None or count <= most:
        return function(*arrays)
    chunks = -(-count // most)
    size = -(-count // chunks)
    parts = tuple(padded(array, chunks * size).reshape(chunks, size, *array.shape[1:]) for array in arrays)
    results = jax.lax.map(jax.checkpoint(lambda part: function(*part)), parts)
    return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:])[:count], results)


def padded(array: Array, count: int) -> Array:
    """`array [T, ...]` made up to `count` rows with zeros, or -1 ("no expert") where it holds integers."""
    if array.shape[0] == count:
        return array
    fill = -1 if jnp.issubdtype(array.dtype, jnp.integer) else 0
    return jnp.pad(array, [(0, count - array.shape[0])] + [(0, 0)] * (array.ndim - 1), constant_values=fill)
