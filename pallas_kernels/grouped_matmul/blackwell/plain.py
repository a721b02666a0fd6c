"""The Blackwell kernel's copies, decode and store in plain operations, for Mosaic's interpreter."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.blackwell.config import SLAB_ROWS, BlackwellTuning
from pallas_kernels.grouped_matmul.kernel_layout import UNIT_COLUMNS, UNIT_ROWS, WORD_ROWS
from pallas_kernels.grouped_matmul.mosaic_parts.geometry import Geometry, Ring, Tile
from pallas_kernels.grouped_matmul.mosaic_parts.plain_memory import PlainMemory


def scratch(shape: Geometry[BlackwellTuning]) -> dict[str, Any]:
    tuning = shape.tuning
    return {
        "w_smem": plgpu.SMEM((tuning.stages, tuning.row_units, tuning.k_units * WORD_ROWS, 32), jnp.uint32),
        "x_smem": plgpu.SMEM(
            (shape.subtiles, tuning.stages * tuning.widest, shape.line), shape.x_dtype, transforms=shape.x_transforms
        ),
        "full": plgpu.Barrier(num_arrivals=1 + shape.subtiles, num_barriers=tuning.stages),
    }


@dataclasses.dataclass(frozen=True)
class PlainSteps(PlainMemory):
    """As `NativeSteps`; the rows of a slab lie in the order of its units."""

    def operand(self, ring: Ring, slab: Any, k_unit: int, constants: Any) -> Any:
        del constants
        units = self.shape.tuning.units
        decoded = self.decoded(ring, pl.ds(slab * units, units), k_unit).reshape(SLAB_ROWS, UNIT_COLUMNS)
        plgpu.commit_smem()  # the interpreter wants reads, too, ordered before the next copy
        return decoded

    def store(self, slab: Any, tile: Tile, first: Any, sums: Any) -> None:
        for unit in range(self.shape.tuning.units):
            rows = sums[unit * UNIT_ROWS : (unit + 1) * UNIT_ROWS]
            self.store_unit(rows, tile, first, self.shape.out_column(tile, slab, unit))
