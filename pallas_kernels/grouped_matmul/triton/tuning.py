"""The Triton kernels' tunings: what a configuration is, and how one is chosen from the shapes and the target alone."""

import dataclasses

from pallas_kernels.grouped_matmul.kernel_layout import UNIT_COLUMNS, UNIT_ROWS


@dataclasses.dataclass(frozen=True)
class WordsTuning:
    """How the kernel for re-laid-out weights cuts its work; all but `narrow`, which may be 0, are powers of two.

    Attributes:
        units: units of 64 rows of N of a block.
        k_units: units of 64 columns of K of a step.
        wide: rows of x of a tile's first part.
        narrow: rows of x of its second part, or 0.
        warps: of a block.
        stages: of the pipeline.
    """

    units: int
    k_units: int
    wide: int
    narrow: int
    warps: int
    stages: int

    @property
    def width(self) -> int:
        """Rows of x of a tile."""
        return self.wide + self.narrow


@dataclasses.dataclass(frozen=True)
class PlainTuning:
    """How the kernel for weights as they are cuts its work; all powers of two.

    Attributes:
        block: columns of the result of a block, so with an activation half as many as its rows of N.
        block_k: columns of K of a step.
        width: rows of x of a tile.
        warps: of a block.
        stages: of the pipeline.
    """

    block: int
    block_k: int
    width: int
    warps: int
    stages: int


# Widths of a tile's two parts, and what a tile costs beside its rows, in rows: on an H200 a tile of w13 took as long as
# 90 rows more than it has.
_WIDTHS = ((16, 0), (32, 0), (64, 0), (64, 16), (64, 32), (128, 0), (128, 16), (128, 32))
_TILE_COST = 90
_WIDEST_BEFORE_HOPPER = 80  # whose products take operands from registers, beside the sums


def choose_words(rows: int, groups: int, n: int, k: int, target: int) -> WordsTuning:
    """A good tuning for `rows` rows over `groups` experts `[n, k]` in the order of `kernel_layout`."""
    mean = -(-rows // max(groups, 1))
    widths = [pair for pair in _WIDTHS if target >= 90 or sum(pair) <= _WIDEST_BEFORE_HOPPER]
    wide, narrow = min(widths, key=lambda pair: -(-mean // sum(pair)) * (_TILE_COST + sum(pair)))
    few = wide + narrow <= 64
    return WordsTuning(
        units=_divisor(n // UNIT_ROWS, 2),
        k_units=_divisor(k // UNIT_COLUMNS, 2 if few else 1),
        wide=wide,
        narrow=narrow,
        warps=4,
        stages=4 if target >= 90 else 3,
    )


def choose_plain(rows: int, groups: int, packed: bool, target: int, gated: bool) -> PlainTuning:
    """A good tuning for `rows` rows over `groups` experts, bfloat16 or (`packed`) MXFP4."""
    mean = -(-rows // max(groups, 1))
    width = min(max(16, _power_of_two(mean)), 128)
    block_k = 128 if packed else 64
    if target >= 100:
        return PlainTuning(128, block_k, width, 8, 4 if width <= 32 else 3)
    if target >= 90:
        return PlainTuning(64 if packed and gated else 128, block_k, width, 8, 3)
    return PlainTuning(64, min(block_k, 64), min(width, 64), 4, 3)


def _power_of_two(count: int) -> int:
    """The least power of two that holds `count`."""
    return 1 << max(count - 1, 0).bit_length()


def _divisor(count: int, most: int) -> int:
    """The largest power of two that divides `count`, up to `most`."""
    return min(most, count & -count)
