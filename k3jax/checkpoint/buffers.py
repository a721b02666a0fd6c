"""Host memory that JAX's CPU backend takes over instead of copying it: gigabytes of weights are not held twice."""

import math
from collections.abc import Callable

import numpy as np

ALIGNMENT = 64  # what that backend asks for

Allocate = Callable[[tuple[int, ...], np.dtype], np.ndarray]


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """`np.empty(shape, dtype)`, aligned."""
    return carver(np.empty(math.prod(shape) * dtype.itemsize + ALIGNMENT, np.uint8))(shape, dtype)


def carver(buffer: np.ndarray) -> Allocate:
    """Gives one aligned array after another out of `buffer`."""
    at = -buffer.ctypes.data % ALIGNMENT

    def carve(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        nonlocal at
        start, size = at, math.prod(shape) * dtype.itemsize
        at += padded(size)
        return buffer[start : start + size].view(dtype).reshape(shape)

    return carve


def padded(size: int) -> int:
    """What an array of `size` bytes takes of a buffer that others follow in."""
    return -(-size // ALIGNMENT) * ALIGNMENT
