"""Comparisons that cannot pass by accident, and the tolerances of one kernel against its reference, as data.

Never an absolute tolerance: outputs of standard deviation 0.04 would let zeros through. A NaN or an infinity never
passes. The tolerances of whole layers are `k3jax.compare.tolerances`.
"""

import dataclasses

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Limits for one comparison: |actual - expected| / |expected| over the whole array, the cosine between the two,
    and by how much their shares of non-zeros may differ."""

    relative_l2: float
    cosine: float = 0.9999
    nonzero: float = 0.01


KERNEL_TOLERANCES = {  # an implementation against its recipe's reference
    "bf16": Tolerance(2e-3),
    "w4a16": Tolerance(2e-3),
    "w4a8": Tolerance(3e-3),
    "w4a8_fp8": Tolerance(3e-3),
}


def as_float64(x: ArrayLike) -> np.ndarray:
    """Any real array, JAX's and ml_dtypes' included, as float64. Exact."""
    return np.asarray(x).astype(np.float64)


def round_bf16(x: ArrayLike) -> np.ndarray:
    """Rounded to bfloat16 by ml_dtypes, as float64."""
    return as_float64(x).astype(ml_dtypes.bfloat16).astype(np.float64)


def relative_l2(actual: ArrayLike, expected: ArrayLike) -> float:
    """`|actual - expected| / |expected|`; 0 where both are all zero, infinite where only `expected` is."""
    truth = as_float64(expected)
    error = float(np.linalg.norm(as_float64(actual) - truth))
    norm = float(np.linalg.norm(truth))
    if norm == 0:
        return 0.0 if error == 0 else float("inf")
    return error / norm


def cosine(actual: ArrayLike, expected: ArrayLike) -> float:
    """The cosine of the angle between the flattened arrays; 1 where both are all zero, 0 where one is."""
    a, b = as_float64(actual).ravel(), as_float64(expected).ravel()
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    if norms == 0:
        return float(not a.any() and not b.any())
    return float(a @ b) / norms


def nonzero_share(x: ArrayLike) -> float:
    """The share of elements that are not zero; 0 for an empty array."""
    values = as_float64(x)
    return float(np.count_nonzero(values)) / max(values.size, 1)


def assert_close(actual: ArrayLike, expected: ArrayLike, tolerance: Tolerance) -> None:
    """Fails unless the arrays have one shape, hold finite numbers only, and differ by less than `tolerance`."""
    a, b = as_float64(actual), as_float64(expected)
    assert a.shape == b.shape, f"shape {a.shape}, expected {b.shape}"
    for name, values in (("actual", a), ("expected", b)):
        bad = int(np.count_nonzero(~np.isfinite(values)))
        assert bad == 0, f"{bad} of {values.size} {name} values are NaN or infinite"
    error, angle = relative_l2(a, b), cosine(a, b)
    shares = nonzero_share(a), nonzero_share(b)
    summary = f"relative L2 {error:.2e}, cosine {angle:.6f}, non-zeros {shares[0]:.3f} of {shares[1]:.3f}"
    assert error <= tolerance.relative_l2, f"{summary}; allowed is {tolerance}"
    assert angle >= tolerance.cosine, f"{summary}; allowed is {tolerance}"
    assert abs(shares[0] - shares[1]) <= tolerance.nonzero, f"{summary}; allowed is {tolerance}"


def assert_same_bits(actual: ArrayLike, expected: ArrayLike) -> None:
    """Fails unless dtype, shape and every bit agree, signs of zeros included; any NaN equals any NaN."""
    a, b = np.asarray(actual), np.asarray(expected)
    assert a.dtype == b.dtype, f"{a.dtype}, expected {b.dtype}"
    assert a.shape == b.shape, f"shape {a.shape}, expected {b.shape}"
    word = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[a.dtype.itemsize]
    differs = np.ascontiguousarray(a).view(word) != np.ascontiguousarray(b).view(word)
    differs &= ~(np.isnan(a.astype(np.float64)) & np.isnan(b.astype(np.float64)))
    if differs.any():
        where = tuple(int(i) for i in np.argwhere(differs)[0])
        raise AssertionError(f"{differs.sum()} of {a.size} differ; first at {where}: {a[where]}, expected {b[where]}")
