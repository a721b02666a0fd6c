"""The Hopper kernel's tuning: what a configuration is, what it needs of the hardware, and how one is chosen."""

import dataclasses

from pallas_kernels.grouped_matmul.kernel_layout import UNIT_COLUMNS, UNIT_ROWS, UNIT_WORDS, Mma
from pallas_kernels.grouped_matmul.schedule import ROW_STEP

SHARED_MEMORY = 232_448  # bytes a block can have on Hopper
EPILOGUE_TOKENS = 32  # rows that a warpgroup turns round in shared memory at a time
LINE_BYTES = 128  # the swizzle's width: columns of x per copy
REGISTERS = {1: (240, 24), 2: (232, 40), 3: (160, 32), 4: (112, 32)}  # consumers' and producer's, by consumers
_WIDEST = {
    1: 304,
    2: 304,
    3: 160,
    4: 80,
}  # widths of a warpgroup's units together: what its accumulators leave room for
_WIDEST_PRODUCT = 256  # wgmma's own limit


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the kernel cuts its work.

    Attributes:
        widths: row-tile widths that are compiled, ascending multiples of 8; a tile runs at the narrowest that holds it.
        warpgroups: consumer warpgroups of a block, side by side along N.
        units: units of 64 rows of N that each of them has.
        k_units: units of 64 columns of K in a pipeline stage.
        stages: pipeline stages.

    Raises:
        ValueError: a value that no shape could use.
    """

    widths: tuple[int, ...]
    warpgroups: int
    units: int
    k_units: int
    stages: int

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.widths, self.widths[1:], strict=False))
        if not self.widths or not ascending or any(w % ROW_STEP or w <= 0 for w in self.widths):
            raise ValueError(f"widths={self.widths} must be ascending positive multiples of {ROW_STEP}")
        if self.warpgroups not in REGISTERS:
            raise ValueError(f"warpgroups={self.warpgroups} is not one of {', '.join(map(str, REGISTERS))}")
        if min(self.units, self.k_units) < 1 or self.stages < 2:
            raise ValueError(f"{self} needs at least one unit and two stages")
        if self.widest > widest(self.warpgroups, self.units):
            raise ValueError(f"{self} needs more accumulators than its warpgroups have registers for")

    @property
    def widest(self) -> int:
        return self.widths[-1]

    @property
    def row_units(self) -> int:
        """Units of 64 rows of N in a block's tile."""
        return self.warpgroups * self.units

    def reason_against(self, n: int, k: int, mma: Mma, gated: bool, groups: int) -> str | None:
        """Why weights `[groups, n, k]` cannot run with this tuning; None if they can."""
        if n % (UNIT_ROWS * self.row_units):
            return f"N={n} is not a multiple of {UNIT_ROWS * self.row_units}"
        if k % (UNIT_COLUMNS * self.k_units):
            return f"K={k} is not a multiple of {UNIT_COLUMNS * self.k_units}"
        if self.k_units * 64 * element_bytes(mma) % LINE_BYTES:
            return f"a stage of {self.k_units * 64} columns is no multiple of {LINE_BYTES} bytes"
        if self.units * subtiles(self.k_units, mma) < 2:
            # The operand registers of a product still running would be written again.
            return f"a stage of {self.units * subtiles(self.k_units, mma)} products is too short for the pipeline"
        needed = shared_memory(self, mma, gated, groups)
        return None if needed <= SHARED_MEMORY else f"{needed} bytes of shared memory exceed {SHARED_MEMORY}"


def widest(warpgroups: int, units: int) -> int:
    """The widest row tile whose accumulators fit."""
    return min(_WIDEST_PRODUCT, _WIDEST[warpgroups] // units // ROW_STEP * ROW_STEP)


def element_bytes(mma: Mma) -> int:
    """Bytes of an element of x."""
    return 2 if mma == "bf16" else 1


def subtiles(k_units: int, mma: Mma) -> int:
    """Copies of 128 bytes that make up a stage's columns of x."""
    return k_units * UNIT_COLUMNS * element_bytes(mma) // LINE_BYTES


def table_words(groups: int) -> int:
    """Words of one schedule table, padded so that a search of 32 entries at a time stays inside."""
    return -(-groups // 32) * 32 + 32


def stage_bytes(widest: int, row_units: int, k_units: int, mma: Mma) -> int:
    """Shared memory of one pipeline stage."""
    return row_units * k_units * UNIT_WORDS * 4 + widest * LINE_BYTES * subtiles(k_units, mma)


def epilogue_bytes(units: int, gated: bool) -> int:
    """Shared memory in which a warpgroup turns its tile round; 16 bytes a row keep the banks apart."""
    return EPILOGUE_TOKENS * (units * (32 if gated else 64) * 2 + 16)


def _fixed_bytes(warpgroups: int, units: int, gated: bool, groups: int) -> int:
    return warpgroups * epilogue_bytes(units, gated) + 2 * table_words(groups) * 4 + 4096  # 4096: barriers, alignment


def shared_memory(tuning: Tuning, mma: Mma, gated: bool, groups: int) -> int:
    """Bytes of shared memory that a block needs."""
    ring = tuning.stages * stage_bytes(tuning.widest, tuning.row_units, tuning.k_units, mma)
    return ring + _fixed_bytes(tuning.warpgroups, tuning.units, gated, groups)


def choose_tuning(rows: int, groups: int, n: int, k: int, mma: Mma, gated: bool) -> Tuning:
    """A good tuning for `rows` rows over `groups` experts `[n, k]`, from the shapes alone.

    Few rows a group: the weights' bytes and their decoding are the limit, and four warpgroups hide its latency. Many:
    the tensor cores are, and two warpgroups with 128 rows of N each read x half as often.

    Raises:
        NotImplementedError: no tuning fits the shape.
    """
    mean = -(-rows // max(groups, 1))
    first = ((4, 1),) if mean <= _DECODE_BOUND[mma] else ()
    for warpgroups, units in (*first, (2, 2), (2, 1), (1, 1)):
        widths = _widths(mean, min(_WIDEST_TILE, widest(warpgroups, units)))
        for least_stages in (3, 2):
            for k_units in (4, 2, 1, 3) if warpgroups == 4 else (2, 4, 1, 3):
                tuning = _fill_memory(widths, warpgroups, units, k_units, mma, gated, groups)
                if tuning is None or tuning.stages < least_stages:
                    continue
                if tuning.reason_against(n, k, mma, gated, groups) is None:
                    return tuning
    raise NotImplementedError(f"no tuning fits weights of N={n} and K={k}: N must be a multiple of 64, K of 128")


_DECODE_BOUND = {"bf16": 80, "e4m3": 40}  # mean rows a group up to which four warpgroups were the faster on an H200
_FEW_ROWS = 40  # up to here a branch on the width costs more than a tile too wide
_MOST_STAGES = 8
_WIDEST_TILE = 152


def _widths(mean: int, limit: int) -> tuple[int, ...]:
    """The width of a mean group's tiles and, where tiles are large, every second narrower one for smaller groups."""
    own = _round_up(-(-mean // max(1, -(-mean // limit))))
    return (own,) if own <= _FEW_ROWS else tuple(range(16 + own % 16, own + 1, 16))


def _round_up(rows: int) -> int:
    return max(ROW_STEP, -(-rows // ROW_STEP) * ROW_STEP)


def _fill_memory(
    widths: tuple[int, ...], warpgroups: int, units: int, k_units: int, mma: Mma, gated: bool, groups: int
) -> Tuning | None:
    """The tuning with as many stages as shared memory holds; None if not even two fit."""
    one = stage_bytes(widths[-1], warpgroups * units, k_units, mma)
    stages = min(_MOST_STAGES, (SHARED_MEMORY - _fixed_bytes(warpgroups, units, gated, groups)) // one)
    return Tuning(widths, warpgroups, units, k_units, stages) if stages >= 2 else None
