"""The Blackwell kernel's tuning: what a configuration is, what it needs of the hardware, and how one is chosen."""

import dataclasses

from pallas_kernels.grouped_matmul.config import (
    EPILOGUE_TOKENS,
    SHARED_MEMORY,
    epilogue_bytes,
    mean_group,
    stage_bytes,
    table_words,
)
from pallas_kernels.grouped_matmul.kernel_layout import UNIT_COLUMNS, UNIT_ROWS, Mma

SLAB_ROWS = 128  # of N: the rows of one product, the lanes of tensor memory
WIDTH_STEP = 16  # a product of 128 rows of N takes a multiple of 16 rows of x
_TENSOR_COLUMNS = 512  # of 32 bits, which a block can have
_OPERAND_COLUMNS = UNIT_COLUMNS // 2  # of tensor memory for 64 columns of bfloat16
_MOST_OPERANDS = 4  # more decoded stages than the decoders are ahead by
_WIDEST_PRODUCT = 256  # tcgen05's own limit
# Registers of a thread of the store's warpgroups, of the decoders', and of the one that copies and multiplies, by how
# many warpgroups there are of the first two.
REGISTERS = {
    (1, 1): (168, 168, 24),
    (1, 2): (152, 152, 24),
    (2, 2): (104, 104, 24),
    (1, 4): (96, 88, 24),
    (2, 4): (64, 88, 24),
}


@dataclasses.dataclass(frozen=True)
class BlackwellTuning:
    """How the kernel cuts its work.

    Attributes:
        widest: rows of x in the widest tile, a multiple of 16; a tile runs at the narrowest multiple that holds it.
        slabs: slabs of 128 rows of N that share a tile's rows of x.
        decoders: warpgroups that decode: each slab's take turns at the stages.
        k_units: units of 64 columns of K in a pipeline stage.
        stages: pipeline stages.

    Raises:
        ValueError: a value that no shape could use.
    """

    widest: int
    slabs: int
    decoders: int
    k_units: int
    stages: int

    def __post_init__(self) -> None:
        if self.widest % WIDTH_STEP or not 0 < self.widest <= _WIDEST_PRODUCT:
            raise ValueError(f"widest={self.widest} is not a multiple of {WIDTH_STEP} up to {_WIDEST_PRODUCT}")
        if (self.slabs, self.decoders) not in REGISTERS:
            known = ", ".join(map(str, REGISTERS))
            raise ValueError(f"(slabs, decoders)={self.slabs, self.decoders} is not one of {known}")
        if self.k_units < 1 or self.stages < 2 or self.stages % self.turns:
            raise ValueError(f"{self} needs a unit of K, and two stages or a multiple of {self.turns}")

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(range(WIDTH_STEP, self.widest + 1, WIDTH_STEP))

    @property
    def turns(self) -> int:
        """Decoders of one slab."""
        return self.decoders // self.slabs

    @property
    def units(self) -> int:
        """Units of 64 rows of N in a slab."""
        return SLAB_ROWS // UNIT_ROWS

    @property
    def row_units(self) -> int:
        return self.slabs * self.units

    @property
    def sums_columns(self) -> int:
        """Of tensor memory for a slab's sums: whole chunks of what the store loads at a time."""
        return -(-self.widest // EPILOGUE_TOKENS) * EPILOGUE_TOKENS if self.widest > WIDTH_STEP else WIDTH_STEP

    @property
    def accumulators(self) -> int:
        """Sets of sums: with two, one is stored while the next tile's products run."""
        return 2 if self._operands_beside(2) >= max(2, self.turns) else 1

    @property
    def operands(self) -> int:
        """Decoded stages that tensor memory holds; 0 if not enough fit."""
        return self._operands_beside(self.accumulators)

    def _operands_beside(self, accumulators: int) -> int:
        left = _TENSOR_COLUMNS - accumulators * self.slabs * self.sums_columns
        fit = min(_MOST_OPERANDS, left // (self.slabs * self.k_units * _OPERAND_COLUMNS))
        fit -= fit % self.turns
        return fit if fit >= 2 else 0

    def reason_against(self, n: int, k: int, gated: bool, groups: int) -> str | None:
        """Why weights `[groups, n, k]` cannot run with this tuning; None if they can."""
        if n % (SLAB_ROWS * self.slabs):
            return f"N={n} is not a multiple of {SLAB_ROWS * self.slabs}"
        if k % (UNIT_COLUMNS * self.k_units):
            return f"K={k} is not a multiple of {UNIT_COLUMNS * self.k_units}"
        if not self.operands:
            return f"{self.slabs} x {self.widest} sums leave tensor memory no room for two decoded stages"
        needed = shared_memory(self, gated, groups)
        return None if needed <= SHARED_MEMORY else f"{needed} bytes of shared memory exceed {SHARED_MEMORY}"


def shared_memory(tuning: BlackwellTuning, gated: bool, groups: int) -> int:
    """Bytes of shared memory that a block needs."""
    return tuning.stages * _stage_bytes(tuning) + _fixed_bytes(tuning.slabs, gated, groups)


def _stage_bytes(tuning: BlackwellTuning) -> int:
    mma: Mma = "bf16"
    return stage_bytes(tuning.widest, tuning.row_units, tuning.k_units, mma)


def _fixed_bytes(slabs: int, gated: bool, groups: int) -> int:
    turned = slabs * epilogue_bytes(SLAB_ROWS // UNIT_ROWS, gated)
    return turned + 2 * table_words(groups) * 4 + 4096  # 4096: barriers, alignment


# Predicted, not measured: no Blackwell GPU has run this.
_DECODE_BOUND = 96  # mean rows a group up to which decoding takes longer than the products
_WIDEST_TILE = 160  # of two slabs: half as many passes over x as one slab of 256 rows would make
_MOST_STAGES = 8


def choose_tuning(rows: int, groups: int, n: int, k: int, gated: bool) -> BlackwellTuning:
    """A good tuning for `rows` rows over `groups` experts `[n, k]`, from the shapes alone.

    Few rows a group: decoding is the limit beside the weights' bytes, and four warpgroups hide its latency. Many: the
    products are, a stage is short, and two slabs read x half as often as one.

    Raises:
        NotImplementedError: no tuning fits the shape.
    """
    mean = mean_group(rows, groups)
    widest = _widest(mean)
    for slabs in (2, 1):
        decoders, k_units_tried = (4, (2, 1)) if mean <= _DECODE_BOUND else (2, (1, 2))
        for k_units in k_units_tried:
            tuning = BlackwellTuning(widest, slabs, decoders, k_units, decoders // slabs * 2)
            room = SHARED_MEMORY - _fixed_bytes(slabs, gated, groups)
            stages = min(_MOST_STAGES, room // _stage_bytes(tuning))
            stages -= stages % tuning.turns
            if stages < 2:
                continue
            tuning = dataclasses.replace(tuning, stages=stages)
            if tuning.reason_against(n, k, gated, groups) is None:
                return tuning
    raise NotImplementedError(f"no tuning fits weights of N={n} and K={k}: N must be a multiple of 128, K of 64")


def _widest(mean: int) -> int:
    """The width of a mean group's tiles: the fewest tiles, of equal heights."""
    height = -(-mean // max(1, -(-mean // _WIDEST_TILE)))
    return max(WIDTH_STEP, -(-height // WIDTH_STEP) * WIDTH_STEP)
