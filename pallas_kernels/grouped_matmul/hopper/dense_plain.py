"""The Hopper kernel's steps for bfloat16 weights in plain operations, for Mosaic's interpreter."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.hopper.dense_geometry import CHUNK, DenseGeometry
from pallas_kernels.grouped_matmul.hopper.plain import RingSteps
from pallas_kernels.grouped_matmul.kernel_layout import UNIT_ROWS
from pallas_kernels.grouped_matmul.mosaic_parts.geometry import Ring, Tile
from pallas_kernels.rounding import to_bfloat16


def scratch(shape: DenseGeometry) -> dict[str, Any]:
    """Shared memory as the GPU's, where a slot's barrier knows the copies of chunks of gate and up one by one."""
    tuning = shape.tuning

    def ring(rows: int) -> Any:
        lines = (shape.subtiles, tuning.stages * rows, shape.line)
        return plgpu.SMEM(lines, jnp.bfloat16, transforms=shape.x_transforms)

    copies = 1 + (tuning.tile_rows // CHUNK if shape.gated else 1)
    return {
        "w_smem": ring(shape.slot_rows),
        "x_smem": ring(tuning.widest),
        "full": plgpu.Barrier(num_arrivals=copies * shape.subtiles, num_barriers=tuning.stages),
        "empty": plgpu.Barrier(num_arrivals=tuning.warpgroups, num_barriers=tuning.stages),
    }


@dataclasses.dataclass(frozen=True)
class DensePlainSteps(RingSteps):
    """As `DenseSteps`."""

    shape: DenseGeometry
    addend_gmem: Any

    def locate(self, tile: Any, group: Any) -> tuple[Any, Any, Any, Any]:
        return self.shape.whole_at(tile) if self.shape.whole else super().locate(tile, group)

    def copy_weights(self, ring: Ring, tile: Tile, step: Any) -> None:
        rows = self.shape.tuning.tile_rows
        first = ring.slot * self.shape.slot_rows
        for s in range(self.shape.subtiles):
            columns = pl.ds((step * self.shape.subtiles + s) * self.shape.line, self.shape.line)
            if not self.shape.gated:
                source = self.w_gmem.at[tile.group, pl.ds(tile.column * rows, rows), columns]
                plgpu.copy_gmem_to_smem(source, self.w_smem.at[s, pl.ds(first, rows)], self.full.at[ring.slot])
                continue
            for chunk in range(rows // CHUNK):
                pair, half = divmod(chunk, 2)
                pairs = rows // (2 * CHUNK)
                source = self.w_gmem.at[tile.group, half, tile.column * pairs + pair, pl.ds(0, CHUNK), columns]
                target = self.w_smem.at[s, pl.ds(first + chunk * CHUNK, CHUNK)]
                plgpu.copy_gmem_to_smem(source, target, self.full.at[ring.slot])

    def operand(self, ring: Ring, warpgroup: Any, unit: int, subtile: int, index: int, constants: Any) -> Any:
        """A unit of the stage's weights, in shared memory."""
        del index, constants
        first = ring.slot * self.shape.slot_rows + (warpgroup * self.shape.tuning.units + unit) * UNIT_ROWS
        return self.w_smem.at[subtile, pl.ds(first, UNIT_ROWS)]

    def factor(self, tile: Tile) -> Any:
        del tile
        return jnp.float32(1)

    def store_row(self, out: Any, tile: Tile, at: Any, column: Any, row: Any) -> None:
        """Stores the columns that are the tile's, in pieces of which each is whole in it or beyond it."""
        piece = math.gcd(self.shape.tile_columns, row.size)
        for first in range(0, row.size, piece):

            def store_piece(first: int = first) -> None:
                columns = pl.ds(column + first, piece)
                y = row[first : first + piece]
                if self.addend_gmem is not None:
                    y = to_bfloat16(y.astype(jnp.float32) + self.addend_gmem[at, columns].astype(jnp.float32))
                out[at, columns] = y

            pl.when(column + first < self.shape.column_end(tile))(store_piece)
