"""The Hopper kernel's tuning: what a configuration is, what it needs of the hardware, and how one is chosen."""

import dataclasses

from pallas_kernels.grouped_matmul.kernel_layout import UNIT_COLUMNS, UNIT_ROWS, UNIT_WORDS, Mma
from pallas_kernels.grouped_matmul.schedule import ROW_STEP

SHARED_MEMORY = 232_448  # bytes a block can have on Hopper
EPILOGUE_TOKENS = 32  # rows that a warpgroup turns round in shared memory at a time
LINE_BYTES = 128  # the swizzle's width: columns of x per copy
REGISTERS = {1: (240, 24), 2: (232, 40), 3: (160, 32), 4: (112, 32)}  # consumers' and producer's, by consumers
_SUMS = {  # registers that a consumer has for float32 sums, by consumers; more for e4m3, whose operands need fewer
    "bf16": {1: 152, 2: 152, 3: 80, 4: 40},
    "e4m3": {1: 192, 2: 192, 3: 112, 4: 60},
}
_MOST_COLUMNS = 256  # of e4m3 products in one sum of the tensor cores: `hopper.products` has the errors
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
        others: how further launches of the same call cut theirs; none of them has others. A group is computed by the
            launch whose tiles cost it least, so that few rows don't pay for tiles that many want, nor the reverse.
        costs: of a tile over all of N that runs at each of the widths, beside those of the other launches; needed
            where there are any.

    Raises:
        ValueError: a value that no shape could use.
    """

    widths: tuple[int, ...]
    warpgroups: int
    units: int
    k_units: int
    stages: int
    others: tuple["Tuning", ...] = ()
    costs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.widths, self.widths[1:], strict=False))
        if not self.widths or not ascending or any(w % ROW_STEP or w <= 0 for w in self.widths):
            raise ValueError(f"widths={self.widths} must be ascending positive multiples of {ROW_STEP}")
        if self.warpgroups not in REGISTERS:
            raise ValueError(f"warpgroups={self.warpgroups} is not one of {', '.join(map(str, REGISTERS))}")
        if min(self.units, self.k_units) < 1 or self.stages < 2:
            raise ValueError(f"{self} needs at least one unit and two stages")
        if self.widest > _WIDEST_PRODUCT:
            raise ValueError(f"{self} has tiles of more than {_WIDEST_PRODUCT} rows, wgmma's limit")
        if any(other.others for other in self.others):
            raise ValueError(f"{self} has other launches within others")
        for each in self.launches if self.others else ():
            if len(each.costs) != len(each.widths) or min(each.costs) < 1:
                raise ValueError(f"costs={each.costs} must be a positive one for each of widths={each.widths}")

    @property
    def widest(self) -> int:
        return self.widths[-1]

    @property
    def launches(self) -> tuple["Tuning", ...]:
        """This one and the others."""
        return (dataclasses.replace(self, others=()), *self.others) if self.others else (self,)

    @property
    def row_units(self) -> int:
        """Units of 64 rows of N in a block's tile."""
        return self.warpgroups * self.units

    @property
    def registers(self) -> tuple[int, int]:
        """A consumer's and the producer's."""
        return REGISTERS[self.warpgroups]

    def sums_fit(self, mma: Mma, partial: int = 1) -> bool:
        """Whether a thread's float32 sums fit its registers: of every unit and, for e4m3, `partial` more of one."""
        sums = self.units + (partial if mma == "e4m3" else 0)
        return self.widest // 2 * sums <= _SUMS[mma][self.warpgroups]

    def reason_against(self, n: int, k: int, mma: Mma, gated: bool, groups: int) -> str | None:
        """Why weights `[groups, n, k]` cannot run with this tuning; None if they can."""
        if n % (UNIT_ROWS * self.row_units):
            return f"N={n} is not a multiple of {UNIT_ROWS * self.row_units}"
        if k % (UNIT_COLUMNS * self.k_units):
            return f"K={k} is not a multiple of {UNIT_COLUMNS * self.k_units}"
        columns = self.k_units * UNIT_COLUMNS
        if columns * element_bytes(mma) % LINE_BYTES:
            return f"a stage of {columns} columns is no multiple of {LINE_BYTES} bytes"
        if mma == "bf16" and self.units * subtiles(self.k_units, mma) < 2:
            # The operand registers of a product still running would be written again.
            return f"a stage of {self.units * subtiles(self.k_units, mma)} products is too short for the pipeline"
        if mma == "e4m3" and columns > _MOST_COLUMNS:
            return f"a stage of {columns} columns is longer than e4m3 products are summed up in the tensor cores"
        if not self.sums_fit(mma):
            return f"{self.units} x {self.widest} sums are more than its warpgroups have registers for"
        needed = shared_memory(self, mma, gated, groups)
        if needed > SHARED_MEMORY:
            return f"{needed} bytes of shared memory exceed {SHARED_MEMORY}"
        reasons = (other.reason_against(n, k, mma, gated, groups) for other in self.others)
        return next((reason for reason in reasons if reason is not None), None)


def widest(warpgroups: int, units: int, mma: Mma) -> int:
    """The widest row tile whose sums fit."""
    sums = units + (mma == "e4m3")
    return min(_WIDEST_PRODUCT, _SUMS[mma][warpgroups] // (ROW_STEP // 2 * sums) * ROW_STEP)


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
    the tensor cores are, and two warpgroups with 128 rows of N each read x half as often. Of e4m3 products, whose
    partial sums need registers too, a tile can have 120 rows so, and 152 where a warpgroup has 64 rows of N.

    Raises:
        NotImplementedError: no tuning fits the shape.
    """
    mean = mean_group(rows, groups)
    for warpgroups, units in _splits(mean, mma):
        limit = min(_WIDEST_TILE[mma, units], widest(warpgroups, units, mma))
        widths = row_widths(mean, limit, mma)
        for least_stages in (3, 2):
            for k_units in (4, 2, 1, 3) if warpgroups == 4 or mma == "e4m3" else (2, 4, 1, 3):
                tuning = _fill_memory(widths, warpgroups, units, k_units, mma, gated, groups)
                if tuning is None or tuning.stages < least_stages:
                    continue
                if tuning.reason_against(n, k, mma, gated, groups) is None:
                    return tuning
    raise NotImplementedError(f"no tuning fits weights of N={n} and K={k}: N must be a multiple of 64, K of 128")


# What was the faster on an H200.
_DECODE_BOUND = {"bf16": 80, "e4m3": 40}  # mean rows a group up to which four warpgroups share a block
_FEW_ROWS = 40  # up to here a branch on the width costs more than a tile too wide
_MOST_STAGES = 8
_WIDEST_TILE = {("bf16", 1): 152, ("bf16", 2): 152, ("e4m3", 1): 152, ("e4m3", 2): 120}  # by units


def _splits(mean: int, mma: Mma) -> tuple[tuple[int, int], ...]:
    """(warpgroups, units of each), the best first."""
    if mean <= _DECODE_BOUND[mma]:
        return (4, 1), (2, 2), (2, 1), (1, 1)
    one_tile_of_one_unit = _WIDEST_TILE[mma, 2] < mean <= _WIDEST_TILE[mma, 1]
    return ((2, 1), (2, 2), (1, 1)) if one_tile_of_one_unit else ((2, 2), (2, 1), (1, 1))


def row_widths(mean: int, limit: int, mma: Mma) -> tuple[int, ...]:
    """The width of a mean group's tiles and, where tiles are large, narrower ones for smaller groups.

    For bfloat16 products every second one. A branch costs e4m3 products more: one of half the width, if a group is one
    tile.
    """
    own = _round_up(-(-mean // max(1, -(-mean // limit))))
    if own <= _FEW_ROWS:
        return (own,)
    if mma == "bf16":
        return tuple(range(16 + own % 16, own + 1, 16))
    return (_round_up(own // 2), own) if _WIDEST_TILE["e4m3", 2] < mean <= limit else (own,)


def mean_group(rows: int, groups: int) -> int:
    """Rows of a group where they are spread evenly, rounded up."""
    return -(-rows // max(groups, 1))


def mean_width(rows: int, groups: int) -> int:
    """The width that holds a mean group in one tile, were there one so wide."""
    return _round_up(mean_group(rows, groups))


def _round_up(rows: int) -> int:
    return max(ROW_STEP, -(-rows // ROW_STEP) * ROW_STEP)


def _fill_memory(
    widths: tuple[int, ...], warpgroups: int, units: int, k_units: int, mma: Mma, gated: bool, groups: int
) -> Tuning | None:
    """The tuning with as many stages as shared memory holds; None if not even two fit."""
    one = stage_bytes(widths[-1], warpgroups * units, k_units, mma)
    stages = min(_MOST_STAGES, (SHARED_MEMORY - _fixed_bytes(warpgroups, units, gated, groups)) // one)
    return Tuning(widths, warpgroups, units, k_units, stages) if stages >= 2 else None
