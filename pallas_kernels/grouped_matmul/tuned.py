"""Which tuning a call of the Hopper kernel gets: one that a search measured, where there is one, else the heuristic's.

`tunings.json` holds the winners of `scripts/tune.py`, each with the GPU, the version of JAX and the day. One holds for
weights of its N and K and for every number of groups with its mean of rows a group, in steps of 8.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

from pallas_kernels.grouped_matmul.config import Tuning, choose_tuning, mean_width
from pallas_kernels.grouped_matmul.kernel_layout import Mma

WINNERS = Path(__file__).with_name("tunings.json")


class Choice(NamedTuple):
    """A tuning and where it is from."""

    tuning: Tuning
    source: str


def choose(rows: int, groups: int, n: int, k: int, mma: Mma, gated: bool) -> Choice:
    """The tuning for `rows` rows over `groups` experts `[n, k]`.

    Raises:
        NotImplementedError: no tuning fits the shape.
    """
    winner = _winners().get(_key(n, k, mma, gated, rows, groups))
    if winner is not None:
        launches, shape = read_tuning(winner).launches, (n, k, mma, gated, groups)
        fitted = [each for launch in launches if (each := _fitted(launch, *shape)) is not None]
        if len(fitted) == len(launches):
            tuning = dataclasses.replace(fitted[0], others=tuple(fitted[1:]))
            return Choice(tuning, "measured on {device}, jax {jax}, {date}".format(**winner))
    return Choice(choose_tuning(rows, groups, n, k, mma, gated), "by the heuristic: none was measured for these sizes")


def _fitted(tuning: Tuning, n: int, k: int, mma: Mma, gated: bool, groups: int) -> Tuning | None:
    """The tuning with as many stages as fit: more groups need longer tables in shared memory."""
    for stages in range(tuning.stages, 1, -1):
        shorter = dataclasses.replace(tuning, stages=stages)
        if shorter.reason_against(n, k, mma, gated, groups) is None:
            return shorter
    return None


class Key(NamedTuple):
    """What a winner is one for."""

    n: int
    k: int
    mma: Mma
    gated: bool
    mean_width: int


def key(record: dict[str, Any]) -> Key:
    """What a record of the search is a winner for."""
    return _key(*(record[name] for name in ("n", "k", "mma", "gated", "rows", "groups")))


def _key(n: int, k: int, mma: Mma, gated: bool, rows: int, groups: int) -> Key:
    return Key(n, k, mma, gated, mean_width(rows, groups))


def read_tuning(record: dict[str, Any]) -> Tuning:
    return _tuning(record["tuning"])


def _tuning(fields: dict[str, Any]) -> Tuning:
    others = tuple(_tuning(other) for other in fields.get("others", ()))
    widths, costs = tuple(fields["widths"]), tuple(fields.get("costs", ()))
    return Tuning(**fields | {"widths": widths, "costs": costs, "others": others})


@functools.cache
def _winners() -> dict[Key, dict[str, Any]]:
    return {key(record): record for record in json.loads(WINNERS.read_text(encoding="utf-8"))}
