"""The sizes of a Hopper kernel whose weights are bfloat16: a tile's rows of N need not fill its units."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels.grouped_matmul import schedule
from pallas_kernels.grouped_matmul.hopper.dense_config import DenseTuning
from pallas_kernels.grouped_matmul.kernel_layout import UNIT_ROWS
from pallas_kernels.grouped_matmul.mosaic_parts.geometry import Geometry, Tile

CHUNK = 8  # rows of N that lie together: of gate and up alternately, so that a thread has both of a column


@dataclasses.dataclass(frozen=True)
class DenseGeometry(Geometry[DenseTuning]):
    """As `Geometry`; `mma` is "bf16". `has_addend`: whether something is added to what the result is."""

    has_addend: bool = False

    @property
    def column_blocks(self) -> int:
        return self.n // self.tuning.tile_rows

    @property
    def tile_columns(self) -> int:
        """Output columns of a tile."""
        return self.tuning.tile_rows // 2 if self.gated else self.tuning.tile_rows

    @property
    def weights(self) -> tuple[int, ...]:
        """The shape in which the kernel sees the weights: the same memory, gate and up and their chunks apart."""
        if not self.gated:
            return self.groups, self.n, self.k
        return self.groups, 2, self.out_columns // CHUNK, CHUNK, self.k

    @property
    def slot_rows(self) -> int:
        """Rows of N that a slot of the ring has room for."""
        return UNIT_ROWS * self.tuning.row_units

    @property
    def turns(self) -> int:
        return self.tuning.turns(self.k)

    @property
    def whole(self) -> bool:
        """Whether there is one group: all rows are taken for its own, so that nothing waits for its size."""
        return self.groups == 1

    @property
    def whole_tiles(self) -> int:
        """The tiles of one group that has every row."""
        return self.tiles(self.rows)

    def whole_at(self, tile: Any) -> tuple[Any, Any, Any, Any]:
        """`tables.locate` of one group that has every row."""
        return jnp.int32(tile >= self.whole_tiles), jnp.int32(0), jnp.int32(0), jnp.int32(self.rows)

    def place(self, local: Any, size: Any) -> tuple[Any, Any, Any]:
        tuning = self.tuning
        return schedule.place_in_bands(local, size, tuning.widest, self.column_blocks, tuning.band)

    def out_column(self, tile: Tile, part: Any, unit: int = 0) -> Any:
        in_tile = (part * self.tuning.units + unit) * (UNIT_ROWS // 2 if self.gated else UNIT_ROWS)
        return tile.column * self.tile_columns + in_tile

    def column_end(self, tile: Tile) -> Any:
        """The output column after the tile's last."""
        return (tile.column + 1) * self.tile_columns
