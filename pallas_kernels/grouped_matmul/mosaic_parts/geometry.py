"""What a compiled kernel knows of its problem, and the small records that its roles hand to each other."""

import dataclasses
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.e8m0 import BLOCK
from pallas_kernels.grouped_matmul import schedule
from pallas_kernels.grouped_matmul.config import LINE_BYTES, element_bytes, subtiles
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


@runtime_checkable
class Sizes(Protocol):
    """What of a tuning says how large tiles and stages are; `config.Tuning` explains the words."""

    @property
    def widths(self) -> tuple[int, ...]: ...
    @property
    def widest(self) -> int: ...
    @property
    def units(self) -> int: ...
    @property
    def row_units(self) -> int: ...
    @property
    def k_units(self) -> int: ...
    @property
    def stages(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class Geometry[Cut: Sizes]:
    """Static sizes. `n` and `k` are the weights', `rows` x's.

    `launches` are the prices of a call's launches if there are several; `launch` is this one.
    """

    rows: int
    groups: int
    n: int
    k: int
    mma: Mma
    activation: Activation | None
    out_format: WrittenFormat
    tuning: Cut
    launches: tuple[schedule.Prices, ...] = ()
    launch: int = 0

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
    def turns(self) -> int:
        """How often sums of bfloat16 products start from zero."""
        return 1

    @property
    def x_dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.bfloat16 if self.mma == "bf16" else jnp.float8_e4m3fn)

    @property
    def x_transforms(self) -> tuple[Any, ...]:
        transforms: Any = plgpu  # whose classes are abstract to a type checker only
        return transforms.TilingTransform((8, self.line)), transforms.SwizzleTransform(LINE_BYTES)

    @property
    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What the kernel writes: the result, or the values and the scales of MXFP8."""
        if self.out_format == "mxfp8":
            values = jax.ShapeDtypeStruct((self.rows, self.out_columns), jnp.float8_e4m3fn)
            return values, jax.ShapeDtypeStruct((self.rows, self.out_columns // BLOCK), jnp.uint8)
        dtype = jnp.float32 if self.out_format == "f32" else jnp.bfloat16
        return (jax.ShapeDtypeStruct((self.rows, self.out_columns), dtype),)

    def tiles(self, size: Any) -> Any:
        """Tiles of a group of `size` rows in this launch."""
        tiles = schedule.row_tiles(size, self.tuning.widest) * self.column_blocks
        if not self.launches:
            return tiles
        return jnp.where(schedule.cheapest(size, self.launches) == self.launch, tiles, 0)

    def place(self, local: Any, size: Any) -> tuple[Any, Any, Any]:
        """(column block, first row, rows) of a tile of a group, both counted from the group's first."""
        return schedule.place(local, size, self.tuning.widest)

    def width(self, rows: Any) -> Any:
        """The compiled width at which a tile of `rows` rows runs."""
        width = jnp.int32(self.tuning.widest)
        for narrower in self.tuning.widths[-2::-1]:
            width = jnp.where(rows <= narrower, narrower, width)
        return width

    def out_column(self, tile: Tile, part: Any, unit: int = 0) -> Any:
        """The first output column of a unit of a part of a tile: what one warpgroup stores."""
        first = tile.column * self.tuning.row_units + part * self.tuning.units + unit
        return first * (UNIT_ROWS // 2 if self.gated else UNIT_ROWS)

    def ring_at(self, tile: Tile) -> Ring:
        """Where in the ring a tile's first stage is."""
        filled = tile.count * self.k_steps
        turn = lax.div(filled, jnp.int32(self.tuning.stages))
        return Ring(filled - turn * self.tuning.stages, lax.rem(turn, jnp.int32(2)))

    def next(self, ring: Ring) -> Ring:
        last = ring.slot == self.tuning.stages - 1
        return Ring(jnp.where(last, 0, ring.slot + 1), jnp.where(last, 1 - ring.parity, ring.parity))
