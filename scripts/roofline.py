"""Predicts the time of the experts' products on a GPU that was never measured, from published rates and what we count.

python scripts/roofline.py

For each case three times, of which the longest is the prediction: the bytes that must move over the memory's rate; the
products of the kernel's whole tiles, rows that pad them included, over the tensor cores' dense rate; and the
instructions of its main loop over the issue slots. Launches, latencies, epilogues and the L2 count nothing, so a
measurement can only be slower, unless a rate or a count here is wrong: that is what it is to find out.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from k3jax.bench.cases import ROWS, Case
from pallas_kernels.grouped_matmul import schedule
from pallas_kernels.grouped_matmul.blackwell.config import SLAB_ROWS, WIDTH_STEP, choose_tuning
from pallas_kernels.grouped_matmul.triton.tuning import PlainTuning, choose_plain

KERNELS = (("bf16", "triton"), ("w4a16", "mosaic"), ("w4a16", "triton"), ("w4a8", "triton"), ("w4a8_fp8", "triton"))


@dataclasses.dataclass(frozen=True)
class Part:
    """A GPU by its vendor's figures: bytes and dense operations a second, and what issues instructions."""

    name: str
    target: int
    memory: float
    bf16: float
    fp8: float
    multiprocessors: int
    clock: float

    def rate(self, recipe: str) -> float:
        """Of the tensor cores that a recipe uses; MXFP4 by e4m3 runs at the rate of e4m3 by e4m3."""
        return self.bf16 if recipe in ("bf16", "w4a16") else self.fp8

    @property
    def slots(self) -> float:
        """Warp instructions a second: a multiprocessor has four schedulers, each of which issues one a cycle."""
        return 4.0 * self.multiprocessors * self.clock


B200 = Part("NVIDIA B200", 100, 8.0e12, 2.25e15, 4.5e15, 148, 1.85e9)

# Instructions that a warp issues in a step of the main loop, by the tile's width, without and with an activation: from
# the machine code for sm_100a by triton 3.9.0 and its assembler, disassembled. Widths between take the next one's.
_STEP = {
    "bf16": {16: (91, 146), 128: (99, 151)},
    "w4a16": {16: (195, 339), 32: (209, 362), 128: (297, 445)},
    "w4a8": {16: (130, 210), 32: (130, 210), 128: (138, 219)},
    "w4a8_fp8": {16: (115, 197), 32: (115, 199), 128: (127, 206)},
}

# The same of `mosaic` a stage, by its units of K: of each of the four warps that decode a slab, and of the warps that
# copy and that start products, together, at the widths that go with it. From its machine code for sm_100a, by jax
# 0.11.2 and the assembler of CUDA 13, disassembled.
_STAGE = {1: (163, 500), 2: (281, 220)}


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Microseconds of each limit, and the widest tile's rows that they were counted with."""

    op: str
    recipe: str
    kernels: str
    rows: int
    width: int
    memory_us: float
    products_us: float
    issue_us: float

    @property
    def us(self) -> float:
        return max(self.memory_us, self.products_us, self.issue_us)

    @property
    def limit(self) -> str:
        times = {"memory": self.memory_us, "products": self.products_us, "issue": self.issue_us}
        return max(times, key=lambda name: times[name])


def predict(case: Case, part: Part, kernels: str = "triton") -> Prediction:
    """The three limits of one product on a part."""
    width, rows, instructions = (_mosaic if kernels == "mosaic" else _triton)(case, part)
    operations = 2.0 * rows * case.columns * case.depth
    return Prediction(
        case.op,
        case.recipe,
        kernels,
        case.rows,
        width,
        case.bytes / part.memory * 1e6,
        operations / part.rate(case.recipe) * 1e6,
        instructions / part.slots * 1e6,
    )


def _triton(case: Case, part: Part) -> tuple[int, int, float]:
    """(a tile's rows, rows of all tiles, warp instructions of all blocks' main loops)"""
    gated = case.op == "w13"
    assert case.groups is not None
    tuning = choose_plain(case.rows, case.groups, case.recipe != "bf16", part.target, gated)
    tiles = int(np.ceil(case.group_sizes / tuning.width).sum())
    return tuning.width, tiles * tuning.width, _instructions(case, tuning, tiles, gated)


def _mosaic(case: Case, part: Part) -> tuple[int, int, float]:
    """As `_triton`; tiles of a group have equal heights, and run at the multiple of 16 that holds them."""
    del part
    assert case.groups is not None
    tuning = choose_tuning(case.rows, case.groups, case.columns, case.depth, case.op == "w13")
    heights = []
    for size in map(int, case.group_sizes):
        tiles = schedule.row_tiles(size, tuning.widest)
        heights += [schedule.place(tile, size, tuning.widest)[2] for tile in range(tiles)]
    rows = sum(-(-height // WIDTH_STEP) * WIDTH_STEP for height in heights)
    decoding, others = _STAGE[tuning.k_units]
    stages = math.ceil(case.columns / (tuning.slabs * SLAB_ROWS)) * math.ceil(case.depth / (tuning.k_units * 64))
    return tuning.widest, rows, float(len(heights) * stages * (tuning.slabs * 4 * decoding + others))


def _instructions(case: Case, tuning: PlainTuning, tiles: int, gated: bool) -> float:
    """Warp instructions of all blocks' main loops."""
    counts = _STEP[case.recipe]
    step = counts[min(width for width in counts if width >= tuning.width)][gated]
    blocks = math.ceil(case.columns / (2 if gated else 1) / tuning.block)
    return tiles * blocks * math.ceil(case.depth / tuning.block_k) * tuning.warps * step


def predictions(part: Part = B200) -> list[Prediction]:
    """Every product, recipe, kernel and number of rows of the benchmark's table."""
    return [
        predict(Case(op, recipe, rows), part, kernels)
        for op in ("w13", "w2")
        for recipe, kernels in KERNELS
        for rows in ROWS
    ]


def as_table(found: list[Prediction]) -> str:
    """A line a product, recipe and kernel, for a document: microseconds and the limit at each number of rows."""
    lines = ["| predicted us | " + " | ".join(f"{rows:,} rows" for rows in ROWS) + " |", "|---" * (len(ROWS) + 1) + "|"]
    for key in dict.fromkeys((each.op, each.recipe, each.kernels) for each in found):
        cells = [f"{each.us:.0f} {each.limit}" for each in found if (each.op, each.recipe, each.kernels) == key]
        op, recipe, kernels = key
        lines.append(f"| {op}, `{recipe}`, `{kernels}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def roofline(
    json_file: Annotated[Path | None, typer.Option("--json", help="File to write all three limits to.")] = None,
) -> None:
    """Predict the experts' products on a B200."""
    found = predictions()
    print(as_table(found))
    if json_file is not None:
        json_file.write_text(json.dumps([dataclasses.asdict(each) for each in found], indent=1))


if __name__ == "__main__":
    typer.run(roofline)
