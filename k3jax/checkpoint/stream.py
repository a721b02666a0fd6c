"""Bytes of many tensors to where they belong: few large reads, ahead of whoever uses what was read."""

import collections
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from k3jax.checkpoint.layer_tensors import Place

THREADS = 4  # While some fill fresh memory, which takes as long as a fast disk does, others keep the disk busy.
_SCRATCH = 1 << 23  # bytes read at a time of rows that are cut
_WHOLE = slice(None)


@dataclass(frozen=True)
class Fill:
    """`target` is to hold `rows` and `columns` of a stored matrix, in the stored dtype; of anything else, all of it."""

    place: Place
    target: np.ndarray
    rows: slice = _WHOLE
    columns: slice = _WHOLE


def fill(fills: Sequence[Fill]) -> None:
    """Reads what the fills ask for: each byte once, neighbouring tensors in one read, whole rows straight to targets.

    A part of every row is cut out of a small copy: its bytes share pages with the rest of the row.

    Raises:
        ValueError: a file has become shorter.
    """
    begins = {id(item): _begin(item) for item in fills}
    cut: dict[tuple[str, int], list[Fill]] = {}
    runs: list[tuple[Fill, int, list[np.ndarray]]] = []
    end = -1
    for item in sorted(fills, key=lambda item: (str(item.place.file.path), begins[id(item)])):
        begin = begins[id(item)]
        if not _has_whole_rows(item):
            cut.setdefault((str(item.place.file.path), item.place.entry.begin), []).append(item)
        elif runs and item.place.file is runs[-1][0].place.file and begin == end:
            runs[-1][2].append(item.target)
            end += item.target.nbytes
        else:
            runs.append((item, begin, [item.target]))
            end = begin + item.target.nbytes
    for first, begin, targets in runs:
        first.place.file.read_into(begin, targets)
    for items in cut.values():
        _fill_columns(items)


def ahead[T](jobs: Iterator[Callable[[], T]], depth: int) -> Iterator[T]:
    """The results of `jobs`, in order; at most `depth` of them are running, wait to be taken, or are the one taken."""
    pending: collections.deque[Future[T]] = collections.deque()
    with ThreadPoolExecutor(min(THREADS, depth), "k3jax-read") as pool:
        try:
            for job in jobs:
                pending.append(pool.submit(job))
                if len(pending) >= depth:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _begin(item: Fill) -> int:
    """The first byte wanted, of a matrix in whole rows or of anything else."""
    entry = item.place.entry
    if item.rows == _WHOLE or len(entry.shape) != 2:
        return entry.begin
    start, _, _ = item.rows.indices(entry.shape[0])
    return entry.begin + start * ((entry.end - entry.begin) // entry.shape[0])


def _has_whole_rows(item: Fill) -> bool:
    shape = item.place.entry.shape
    return len(shape) != 2 or item.columns.indices(shape[1]) == (0, shape[1], 1)


def _fill_columns(items: Sequence[Fill]) -> None:
    """Reads the rows of one matrix that several targets want columns of."""
    place = items[0].place
    rows, columns = place.entry.shape
    dtype = place.file.dtype(place.name)
    step = max(1, _SCRATCH // (columns * dtype.itemsize))
    scratch = np.empty((min(step, rows), columns), dtype)
    wanted = [item.rows.indices(rows)[:2] for item in items]
    for start in range(min(low for low, _ in wanted), max(high for _, high in wanted), step):
        part = scratch[: min(step, rows - start)]
        place.file.read_into(place.entry.begin + start * columns * dtype.itemsize, [part])
        for item, (low, high) in zip(items, wanted, strict=True):
            first, last = max(low, start), min(high, start + len(part))
            if first < last:
                item.target[first - low : last - low] = part[first - start : last - start, item.columns]
