"""Tile sizes of the `xla` implementation, as pure functions of the shapes."""

import dataclasses

_SMALLEST_ROW_TILE = 16  # CPU matrix units want at least this many rows; fewer fall to a slow matrix-vector product
_LARGEST_ROW_TILE = 256


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Rows and output columns of one step. `columns` divides the width exactly, so that no column is added twice."""

    rows: int
    columns: int


def xla_tiling(*, rows: int, groups: int, width: int, depth: int, platform: str) -> Tiling:
    """The tile for `[rows, depth] x [groups, width, depth]`.

    A step holds `columns x depth` weights as bfloat16. On a CPU 4 MiB of them stay in the cache; a GPU pays for each
    step's launch and takes 64 MiB. The row tile is the mean group rounded up to a power of two.
    """
    budget = (4 if platform == "cpu" else 64) << 20
    columns = largest_divisor(width, max(1, budget // (2 * depth)))
    row_tile = max(_SMALLEST_ROW_TILE, min(_LARGEST_ROW_TILE, 1 << (max(rows // groups, 1) - 1).bit_length()))
    return Tiling(rows=min(row_tile, rows), columns=columns)


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit` (at least 1)."""
    return next(d for d in range(min(number, limit), 0, -1) if number % d == 0)
