"""How the Hopper kernel of bfloat16 weights cuts its work, and how a cut is chosen from the shapes alone.

Few rows: the weights' bytes are the limit, and they flow fastest where every multiprocessor has the same share of them
in one tile. So a tile has as many rows of N as an even share, in steps of 8, though `wgmma` multiplies 64 at a time.
Many rows: the tensor cores are the limit, and a tile is as large as a block's registers hold.
"""

import dataclasses
import itertools

from pallas_kernels.grouped_matmul.config import (
    LINE_BYTES,
    SHARED_MEMORY,
    epilogue_bytes,
    mean_group,
    table_words,
)
from pallas_kernels.grouped_matmul.kernel_layout import UNIT_COLUMNS, UNIT_ROWS
from pallas_kernels.grouped_matmul.schedule import ROW_STEP, row_tiles

_REGISTERS = {1: (240, 40), 2: (232, 40), 3: (160, 32), 4: (112, 32)}  # consumers' and producer's, by consumers
_SUMS = {1: 192, 2: 184, 3: 96, 4: 64}  # registers that a consumer has for float32 sums, by consumers
_WIDEST_PRODUCT = 256  # wgmma's own limit
_LONGEST_COPY = 256  # rows that a tensor copy can bring
_LONGEST_SUM = 1024  # columns that the tensor cores add up, where registers hold totals
_MULTIPROCESSORS = 132  # of an H100 or H200: what an even share is


@dataclasses.dataclass(frozen=True)
class DenseTuning:
    """How the kernel cuts its work.

    Attributes:
        widths: row-tile widths that are compiled, ascending multiples of 8; a tile runs at the narrowest that holds it.
        warpgroups: consumer warpgroups of a block, side by side along N.
        units: units of 64 rows of N that each of them multiplies.
        tile_rows: rows of N in a tile, gate and up counted; the units beyond it hold anything.
        k_units: units of 64 columns of K in a pipeline stage.
        stages: pipeline stages.
        band: row tiles that are worked on before the next ones, in all column blocks.

    Raises:
        ValueError: a value that no shape could use.
    """

    widths: tuple[int, ...]
    warpgroups: int
    units: int
    tile_rows: int
    k_units: int
    stages: int
    band: int

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in itertools.pairwise(self.widths))
        if not self.widths or not ascending or any(w % ROW_STEP or w <= 0 for w in self.widths):
            raise ValueError(f"widths={self.widths} must be ascending positive multiples of {ROW_STEP}")
        if self.warpgroups not in _REGISTERS:
            raise ValueError(f"warpgroups={self.warpgroups} is not one of {', '.join(map(str, _REGISTERS))}")
        if min(self.units, self.k_units, self.band) < 1 or self.stages < 2:
            raise ValueError(f"{self} needs at least one unit, one band and two stages")
        if self.widest > _WIDEST_PRODUCT:
            raise ValueError(f"{self} has tiles of more than {_WIDEST_PRODUCT} rows, wgmma's limit")
        most = min(UNIT_ROWS * self.row_units, _LONGEST_COPY)
        if not 0 < self.tile_rows <= most or self.tile_rows % ROW_STEP:
            raise ValueError(f"{self}: tile_rows must be a positive multiple of {ROW_STEP} up to {most}")

    @property
    def widest(self) -> int:
        return self.widths[-1]

    @property
    def row_units(self) -> int:
        """Units of 64 rows of N in a block's tile."""
        return self.warpgroups * self.units

    @property
    def registers(self) -> tuple[int, int]:
        """A consumer's and the producer's."""
        return _REGISTERS[self.warpgroups]

    def reason_against(self, n: int, k: int, gated: bool, groups: int) -> str | None:
        """Why weights `[groups, n, k]` cannot run with this tuning; None if they can."""
        if n % self.tile_rows:
            return f"N={n} is not a multiple of {self.tile_rows}"
        if gated and self.tile_rows % (2 * ROW_STEP):
            return f"a tile of {self.tile_rows} rows does not hold as many of gate as of up in steps of {ROW_STEP}"
        if k % (UNIT_COLUMNS * self.k_units):
            return f"K={k} is not a multiple of {UNIT_COLUMNS * self.k_units}"
        if not self.sums_fit():
            return f"{self.units} x {self.widest} sums are more than its warpgroups have registers for"
        needed = self.shared_memory(gated, groups)
        return None if needed <= SHARED_MEMORY else f"{needed} bytes of shared memory exceed {SHARED_MEMORY}"

    def sums_fit(self) -> bool:
        """Whether a thread's float32 sums fit its registers."""
        return self.widest // 2 * self.units <= _SUMS[self.warpgroups]

    def turns(self, k: int) -> int:
        """How often sums of K columns start from zero: so that none is longer than `_LONGEST_SUM`, if there is room.

        Totals need as many registers again.
        """
        steps = k // (UNIT_COLUMNS * self.k_units)
        if self.units * self.widest > _SUMS[self.warpgroups]:
            return 1
        return next(count for count in range(1, steps + 1) if steps % count == 0 and k <= count * _LONGEST_SUM)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one pipeline stage."""
        return (UNIT_ROWS * self.row_units + self.widest) * LINE_BYTES * self.k_units

    def shared_memory(self, gated: bool, groups: int) -> int:
        """Bytes of shared memory that a block needs."""
        return self.stages * self.stage_bytes + self.fixed_bytes(gated, groups)

    def fixed_bytes(self, gated: bool, groups: int) -> int:
        """Shared memory beside the stages: the store's buffers, the schedule's tables, barriers and alignment."""
        return self.warpgroups * epilogue_bytes(self.units, gated) + 2 * table_words(groups) * 4 + 4096


def choose_tuning(rows: int, groups: int, n: int, k: int, gated: bool, *, fine_sums: bool = False) -> DenseTuning:
    """A good tuning for `rows` rows over `groups` weights `[n, k]`, from the shapes alone: `cost`'s favourite.

    With `fine_sums` of those whose registers hold totals too.

    Raises:
        NotImplementedError: no tuning fits the shape.
    """
    found = candidates(rows, groups, n, k, gated, 2 if fine_sums else 1)
    able = [tuning for tuning in found if tuning.reason_against(n, k, gated, groups) is None]
    if not able:
        step = ROW_STEP * (2 if gated else 1)
        raise NotImplementedError(
            f"no tuning fits weights of N={n} and K={k}: N must be a multiple of {step}, K of {UNIT_COLUMNS}"
        )
    return min(able, key=lambda tuning: cost(tuning, rows, groups, n, k))


_CUTS = ((1, 1), (1, 2), (2, 1), (2, 2), (3, 1))  # (warpgroups, units of each)
# On an H200, 64 rows by [7168, 6144] took 29.8 us in six stages of 128 columns, 30.0 in thirteen of 64, 31.8 in three
# of 256; by [12288, 7168] 51.3 in nine of 64, 66.9 in two of 256.
_LEAST_STAGES, _ENOUGH_STAGES, _MOST_STAGES = 3, 6, 12
_BAND = 12  # row tiles: with 11 column blocks about as many tiles as there are multiprocessors


def candidates(rows: int, groups: int, n: int, k: int, gated: bool, sums: int) -> list[DenseTuning]:
    """Tunings that are worth a look: for each cut of a block the widths that share a mean group's rows evenly.

    A thread's registers hold each width's sums, `sums` times over.
    """
    mean = max(1, mean_group(rows, groups))
    found = []
    for warpgroups, units in _CUTS:
        limit = min(_WIDEST_PRODUCT, _SUMS[warpgroups] // (ROW_STEP // 2 * units * sums) * ROW_STEP)
        fewest = row_tiles(mean, limit)
        widths = {_round_up(-(-mean // tiles)) for tiles in range(fewest, 2 * fewest + 1)} | {min(limit, 128)}
        for width in sorted(widths):
            for tile_rows in _tile_rows(n, UNIT_ROWS * warpgroups * units, 2 * ROW_STEP if gated else ROW_STEP):
                one = DenseTuning((min(width, limit),), warpgroups, units, tile_rows, 1, 2, _BAND)
                lengths = [length for length in (4, 2, 1) if k % (UNIT_COLUMNS * length) == 0]
                found += _staged(one, lengths if mean <= UNIT_ROWS else [1], gated, groups)
    return found


def _staged(tuning: DenseTuning, lengths: list[int], gated: bool, groups: int) -> list[DenseTuning]:
    """`tuning` with the longest stages of which there is room for enough, or else with the shortest; none for three."""
    left = SHARED_MEMORY - tuning.fixed_bytes(gated, groups)
    for k_units in lengths:
        stages = min(_MOST_STAGES, left // (tuning.stage_bytes * k_units))
        if stages >= (_LEAST_STAGES if k_units == lengths[-1] else _ENOUGH_STAGES):
            return [dataclasses.replace(tuning, k_units=k_units, stages=stages)]
    return []


def cost(tuning: DenseTuning, rows: int, groups: int, n: int, k: int) -> float:
    """Predicted cycles of the whole product: waves of tiles, each as long as its products or its bytes take.

    Weights that memory cannot bring faster are a floor; of what reaches it, the one that leaves a multiprocessor the
    least to read is taken, and of such the smallest tile.
    """
    mean = max(1, mean_group(rows, groups))
    tiles = groups * (n // tuning.tile_rows) * row_tiles(mean, tuning.widest)
    waves = -(-tiles // _MULTIPROCESSORS)
    columns = k / UNIT_COLUMNS
    product = max(2 * tuning.widest, _LEAST_PRODUCT) * tuning.row_units * (_TOTALS if tuning.turns(k) > 1 else 1)
    bytes_ = (tuning.tile_rows + tuning.widest) * LINE_BYTES
    tile = columns * max(product, bytes_ / _BYTES_A_CYCLE) + _TILE_CYCLES
    memory = 2 * groups * n * k / _CHIP_BYTES_A_CYCLE
    share = waves * columns * bytes_ / _BYTES_A_CYCLE / 14 + memory * tuning.tile_rows * _LARGE_TILE
    return max(memory, waves * tile) + share


_LEAST_PRODUCT = 64  # cycles of four products of 64 x 16 weights, whatever their width
_TOTALS = 1.15  # how much longer products take of which float32 totals take up the sums
_BYTES_A_CYCLE = 56  # that reach a multiprocessor when all read, most from the L2
_CHIP_BYTES_A_CYCLE = 2500  # from memory
_TILE_CYCLES = 3000  # to fill the pipeline and to store
# What a row of N of a tile adds to the weights' time. On an H200, 8 rows by gate and up of [67584, 7168] took 220.0 us
# in tiles of 64 and 220.1 of 128 rows of N, 223.9 of 256; 64 rows 233.6, 228.2 and 231.8.
_LARGE_TILE = 0.01 / 128


def _tile_rows(n: int, most: int, step: int) -> list[int]:
    """Rows of N of a tile for a block that multiplies up to `most`: N's divisors, of which small blocks need any."""
    least = most // 2 if most > UNIT_ROWS else 0
    return [rows for rows in range(most, least, -step) if n % rows == 0]


def _round_up(rows: int) -> int:
    return max(ROW_STEP, -(-rows // ROW_STEP) * ROW_STEP)
