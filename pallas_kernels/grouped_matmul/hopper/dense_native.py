"""The Hopper kernel's steps for bfloat16 weights: tensor copies bring them as they are, `wgmma` reads them there."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.config import LINE_BYTES, epilogue_bytes, table_words
from pallas_kernels.grouped_matmul.hopper.dense_geometry import CHUNK, DenseGeometry
from pallas_kernels.grouped_matmul.hopper.native import NativeSteps
from pallas_kernels.grouped_matmul.kernel_layout import UNIT_COLUMNS, UNIT_ROWS
from pallas_kernels.grouped_matmul.mosaic_parts import epilogue
from pallas_kernels.grouped_matmul.mosaic_parts.copies import as_index, barrier_at
from pallas_kernels.grouped_matmul.mosaic_parts.geometry import Ring, Tile
from pallas_kernels.grouped_matmul.mosaic_parts.ptx import Value, add, mul, utils


def scratch(shape: DenseGeometry) -> dict[str, Any]:
    """Shared memory: the ring of weights and rows, the store's buffers, the barriers, the schedule tables."""
    tuning = shape.tuning

    def ring(rows: int) -> Any:
        lines = (shape.subtiles, tuning.stages * rows, shape.line)
        return plgpu.SMEM(lines, jnp.bfloat16, transforms=shape.x_transforms)

    return {
        "w_smem": ring(shape.slot_rows),
        "x_smem": ring(tuning.widest),
        "turn_smem": plgpu.SMEM((tuning.warpgroups * epilogue_bytes(tuning.units, shape.gated) // 4,), jnp.uint32),
        "barriers": plgpu.SMEM((4 * tuning.stages,), jnp.uint32),
        "table": plgpu.SMEM((2 * table_words(shape.groups),), jnp.int32),
    }


@dataclasses.dataclass(frozen=True)
class DenseSteps(NativeSteps):
    """As `NativeSteps`, of which copies and operands of weights differ."""

    shape: DenseGeometry
    addend_gmem: Any  # None without an addend

    def build_tables(self, sizes: Value, table: Value) -> None:
        if not self.shape.whole:
            super().build_tables(sizes, table)

    def constants(self) -> tuple[Any, ...]:
        return ()

    def locate(self, tile: Any, group: Any) -> tuple[Any, Any, Any, Any]:
        return self.shape.whole_at(tile) if self.shape.whole else super().locate(tile, group)

    @property
    def w_transforms(self) -> tuple[Any, ...]:
        return self.shape.x_transforms

    @property
    def weight_bytes(self) -> int:
        return self.shape.tuning.tile_rows * self.shape.tuning.k_units * LINE_BYTES

    def copy_weights(self, ctx: Any, source: Value, target: Value, where: tuple[Value, ...], full: Value) -> None:
        """One tensor copy for each 64 columns; of gate and up, their chunks of rows alternate in shared memory."""
        shape, (slot, group, column, k_unit) = self.shape, where
        chunks = shape.tuning.tile_rows // CHUNK
        first = as_index(mul(slot, shape.slot_rows // CHUNK))
        for s in range(shape.subtiles):
            # In memory w_smem is [subtiles, stages * slot_rows / 8, 1, 8, line].
            tile = utils.memref_slice(target, (s, mgpu.ds(first, chunks), 0))
            columns = mgpu.ds(as_index(mul(add(k_unit, s), UNIT_COLUMNS)), UNIT_COLUMNS)
            transform: tuple[Any, ...] = ()
            if shape.gated:
                pairs = chunks // 2
                tile = utils.memref_unfold(tile, 0, (pairs, 2))
                rows: tuple[Any, ...] = (slice(None), mgpu.ds(as_index(mul(column, pairs)), pairs), slice(None))
                transform = (mgpu.TransposeTransform((1, 0, 2, 3)),)
            else:
                tile = utils.memref_fold(tile, 0, 2)
                rows = (mgpu.ds(as_index(mul(column, shape.tuning.tile_rows)), shape.tuning.tile_rows),)
            ctx.async_copy(
                src_ref=source,
                dst_ref=tile,
                gmem_slice=(as_index(group), *rows, columns),
                gmem_transform=transform,
                swizzle=LINE_BYTES,
                barrier=barrier_at(full),
                arrive=False,
                predicate=None,
            )

    def operand(self, ring: Ring, warpgroup: Any, unit: int, subtile: int, index: int, constants: Any) -> Any:
        """A unit of the stage's weights, in shared memory."""
        del index, constants
        tuning = self.shape.tuning
        chunk = ring.slot * (self.shape.slot_rows // CHUNK) + (warpgroup * tuning.units + unit) * (UNIT_ROWS // CHUNK)
        # A multiple of 8 times 8, as of x in `products`.
        return self.w_smem.at[subtile, pl.ds((chunk * CHUNK).astype(jnp.uint32), UNIT_ROWS)]

    def store(self, warpgroup: Any, tile: Tile, accumulators: list[Any]) -> None:
        shape = self.shape
        partial = shape.tuning.tile_rows < shape.slot_rows
        spec = epilogue.Store(shape.tuning.widest, shape.activation, shape.out_columns, shape.out_format, partial)
        where: tuple[Any, ...] = (
            warpgroup,
            tile.row,
            tile.row + tile.rows,
            shape.out_column(tile, warpgroup),
            jnp.int32(0),
        )
        if partial:
            where += (shape.column_end(tile),)
        epilogue.store(spec, accumulators, self.out_gmem, self.turn_smem, where, None, self.addend_gmem)
