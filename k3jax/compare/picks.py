"""How far two routers agree: picks as sets, near ties apart."""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.integer]


@dataclasses.dataclass(frozen=True)
class Picks:
    """Ours against the truth's.

    Attributes:
        agreement: share of (token, slot) pairs whose expert the truth picked too.
        near_ties: pairs that differ only because their scores are closer than float32 tells apart.
        disagreeing: pairs that differ for no such reason. tokens: the tokens of those pairs.
    """

    agreement: float
    near_ties: int
    disagreeing: int
    tokens: tuple[int, ...]


def compare_picks(ours: Ids, truth: Ids, scores: NDArray[Any] | None, near_tie: float) -> Picks:
    """Compares ids `[T, X]`; `scores [T, E]` are the truth's biased scores, without which nothing is a near tie."""
    near_ties = disagreeing = 0
    tokens = []
    for token in np.flatnonzero(~same_sets(ours, truth)):
        mine, theirs = list(ours[token]), list(truth[token])
        extra = [expert for expert in mine if expert not in theirs]
        lost = [expert for expert in theirs if expert not in mine]
        pairs = max(len(extra), len(lost), 1)  # One expert named twice instead of two leaves both lists short.
        if scores is not None and extra and lost and min(extra) >= 0 and min(lost) >= 0:
            contested = scores[token][extra + lost]
            if len(extra) == len(lost) and contested.max() - contested.min() <= near_tie:
                near_ties += pairs
                continue
        disagreeing += pairs
        tokens.append(int(token))
    total = max(ours.size, 1)
    return Picks(1 - (near_ties + disagreeing) / total, near_ties, disagreeing, tuple(tokens))


def same_sets(ours: Ids, truth: Ids) -> NDArray[np.bool_]:
    """Which tokens have the same picks in any order: `[T, X], [T, X] -> [T]`."""
    return (np.sort(ours, axis=-1) == np.sort(truth, axis=-1)).all(axis=-1)


def by_expert(weights: NDArray[Any], ids: Ids) -> NDArray[Any]:
    """Each token's weights `[T, X]` in the order of their expert ids, so that two routers' can be compared."""
    return np.take_along_axis(weights, np.argsort(ids, axis=-1, kind="stable"), axis=-1)
