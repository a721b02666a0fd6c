"""What a compiled Hopper kernel knows of its problem, and the small records that its roles hand to each other."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul import schedule
from pallas_kernels.grouped_matmul.config import LINE_BYTES, Tuning, element_bytes, subtiles
from pallas_kernels.grouped_matmul.kernel_layout import UNIT_COLUMNS, UNIT_ROWS, Mma
from pallas_kernels.situ import Activation

WrittenFormat = Literal["bf16", "f32", "mxfp8"]  # of the result, as the kernel itself can write it


class Ring(NamedTuple):
    """A place in the pipeline's ring: the slot, and whether the ring was gone round an even or odd number of times."""

    slot: Any
    parity: Any


class Tile(NamedTuple):
    """One tile of work: its number in the block's own order, and where it is."""

    count: Any
    group: Any
    column: Any  # column block
    row: Any  # first row of x
    rows: Any


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Static sizes. `n` and `k` are the weights', `rows` x's."""

    rows: int
    groups: int
    n: int
    k: int
    mma: Mma
    activation: Activation | None
    out_format: WrittenFormat
    tuning: Tuning

    @property
    def gated(self) -> bool:
        return self.activation is not None

    @property
    def out_columns(self) -> int:
        return self.n // 2 if self.gated else self.n

    @property
    def column_blocks(self) -> int:
        return self.n // (UNIT_ROWS * self.tuning.row_units)

    @property
    def k_steps(self) -> int:
        return self.k // (UNIT_COLUMNS * self.tuning.k_units)

    @property
    def line(self) -> int:
        """Elements of x in 128 bytes, the columns of one tensor copy and of one chain of products."""
        return LINE_BYTES // element_bytes(self.mma)

    @property
    def subtiles(self) -> int:
        return subtiles(self.tuning.k_units, self.mma)

    @property
    def partial_sums(self) -> int:
        """Partial sums of a unit in a stage of e4m3 products: one for each 128 columns, or one if they do not fit.

        Where the width is branched on they would not: the assembler keeps copies of them.
        """
        fit = len(self.tuning.widths) == 1 and self.tuning.sums_fit(self.mma, partial=self.subtiles)
        return self.subtiles if fit else 1

    @property
    def x_dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.bfloat16 if self.mma == "bf16" else jnp.float8_e4m3fn)

    @property
    def x_transforms(self) -> tuple[Any, ...]:
        transforms: Any = plgpu  # whose classes are abstract to a type checker only
        return transforms.TilingTransform((8, self.line)), transforms.SwizzleTransform(LINE_BYTES)

    def tiles(self, size: Any) -> Any:
        """Tiles of a group of `size` rows."""
        return schedule.row_tiles(size, self.tuning.widest) * self.column_blocks

    def width(self, rows: Any) -> Any:
        """The compiled width at which a tile of `rows` rows runs."""
        width = jnp.int32(self.tuning.widest)
        for narrower in self.tuning.widths[-2::-1]:
            width = jnp.where(rows <= narrower, narrower, width)
        return width

    def out_column(self, tile: Tile, warpgroup: Any) -> Any:
        """The first output column of a warpgroup's part of a tile."""
        unit = tile.column * self.tuning.row_units + warpgroup * self.tuning.units
        return unit * (UNIT_ROWS // 2 if self.gated else UNIT_ROWS)

    def ring_at(self, tile: Tile) -> Ring:
        """Where in the ring a tile's first stage is."""
        filled = tile.count * self.k_steps
        turn = lax.div(filled, jnp.int32(self.tuning.stages))
        return Ring(filled - turn * self.tuning.stages, lax.rem(turn, jnp.int32(2)))

    def next(self, ring: Ring) -> Ring:
        last = ring.slot == self.tuning.stages - 1
        return Ring(jnp.where(last, 0, ring.slot + 1), jnp.where(last, 1 - ring.parity, ring.parity))
