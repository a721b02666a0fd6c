"""What an array differs by from its truth, in numbers that hide nothing: relative, never absolute.

Non-finite values are counted apart. A position where only one of the two is finite is `broken`; one where neither is
(an engine may produce NaN, and so may we) is left out of the other numbers.
"""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[Any]
HISTOGRAM_FIRST, HISTOGRAM_LAST = -24, 3
"""Errors are counted by powers of two of the truth's root mean square, from 2^-24 (and below) to 2^3 (and above)."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Ours against the truth, over a whole array.

    Attributes:
        relative_l2: `|ours - truth| / |truth|`; infinite where the truth is all zero and ours is not.
        cosine: of the angle between the two; 0 where exactly one of them is all zero.
        max_error: largest absolute difference. nonzero, nonzero_truth: shares of elements that are not zero.
        broken: elements that are NaN or infinite in exactly one of the two. elements: how many were compared.
    """

    relative_l2: float
    cosine: float
    max_error: float
    nonzero: float
    nonzero_truth: float
    broken: int
    elements: int


def difference(ours: Numbers, truth: Numbers) -> Difference:
    """The difference of two arrays of one shape, any float dtypes, computed in float64."""
    a, b, broken = _finite(ours, truth)
    size = max(a.size, 1)
    error = a - b
    return Difference(
        relative_l2=_ratio(_norm(error), _norm(b)),
        cosine=_cosine(a, b),
        max_error=float(np.abs(error).max(initial=0.0)),
        nonzero=float(np.count_nonzero(a) / size),
        nonzero_truth=float(np.count_nonzero(b) / size),
        broken=int(np.count_nonzero(broken)),
        elements=int(a.size),
    )


def token_errors(ours: Numbers, truth: Numbers) -> Numbers:
    """Relative L2 of each row: `[T, N], [T, N] -> [T]`; infinite for a row with a broken element."""
    a, b, broken = _finite(ours, truth)
    errors = _row_ratio(np.sum((a - b) ** 2, axis=-1), np.sum(b**2, axis=-1))
    return np.where(broken.any(axis=-1), np.inf, errors)


def expert_errors(ours: Numbers, truth: Numbers, ids: NDArray[np.integer], num_experts: int) -> Numbers:
    """Relative L2 over the tokens that picked each expert: `[T, N], [T, N], ids [T, X] -> [E]`; NaN where none did."""
    a, b, broken = _finite(ours, truth)
    error = np.where(broken.any(axis=-1), np.inf, np.sum((a - b) ** 2, axis=-1))
    picked = (ids[:, :, None] == np.arange(num_experts)).any(axis=1)
    errors, sizes = (
        np.sum(np.where(picked, of_token[:, None], 0.0), axis=0) for of_token in (error, np.sum(b**2, axis=-1))
    )
    return np.where(picked.any(axis=0), _row_ratio(errors, sizes), np.nan)


def relative_rms(ours: Numbers, truth: Numbers) -> float:
    """Root mean square of each element's own relative error: small values weigh as much as large ones."""
    a, b, broken = _finite(ours, truth)
    if broken.any():
        return float("inf")
    return float(np.sqrt(np.mean(_row_ratio((a - b) ** 2, b**2) ** 2))) if a.size else 0.0


def histogram(ours: Numbers, truth: Numbers) -> tuple[int, ...]:
    """How many elements' errors lie in each power of two of the truth's root mean square; exact ones are left out.

    Entry i counts `2^(HISTOGRAM_FIRST + i) <= error / rms < 2^(HISTOGRAM_FIRST + i + 1)`, the ends everything beyond.
    """
    a, b, _ = _finite(ours, truth)
    error = np.abs(a - b)
    rms = float(np.sqrt(np.mean(b**2))) if b.size else 0.0
    scaled = error[error > 0] / (rms or 1.0)
    exponent = np.clip(np.floor(np.log2(scaled)), HISTOGRAM_FIRST, HISTOGRAM_LAST).astype(np.int64)
    counts = np.bincount(exponent - HISTOGRAM_FIRST, minlength=HISTOGRAM_LAST - HISTOGRAM_FIRST + 1)
    return tuple(int(count) for count in counts)


def _finite(ours: Numbers, truth: Numbers) -> tuple[Numbers, Numbers, NDArray[np.bool_]]:
    """Both in float64, with zeros in both wherever either isn't finite, and where exactly one isn't."""
    assert ours.shape == truth.shape, (ours.shape, truth.shape)
    a, b = ours.astype(np.float64), truth.astype(np.float64)
    finite_a, finite_b = np.isfinite(a), np.isfinite(b)
    both = finite_a & finite_b
    return np.where(both, a, 0.0), np.where(both, b, 0.0), finite_a != finite_b


def _norm(values: Numbers) -> float:
    return float(np.sqrt(np.sum(values**2)))


def _ratio(error: float, size: float) -> float:
    if error == 0:
        return 0.0
    return error / size if size else float("inf")


def _row_ratio(error: Numbers, size: Numbers) -> Numbers:
    """`sqrt(error / size)`, where 0 / 0 is 0 and anything else over 0 infinite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(error == 0, 0.0, np.sqrt(error / size))


def _cosine(a: Numbers, b: Numbers) -> float:
    sizes = _norm(a) * _norm(b)
    if sizes == 0:
        return 1.0 if not a.any() and not b.any() else 0.0
    return float(np.clip(np.sum(a * b) / sizes, -1.0, 1.0))
