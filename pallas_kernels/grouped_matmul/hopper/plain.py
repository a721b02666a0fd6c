"""The Hopper kernel's steps in plain operations, for Mosaic's interpreter: the same roles, ring, barriers and schedule.

Decoded weights pass through shared memory, since the interpreter knows no `wgmma` with an operand in registers.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.kernel_layout import WORD_ROWS
from pallas_kernels.grouped_matmul.mosaic_parts.geometry import Geometry, Ring, Tile
from pallas_kernels.grouped_matmul.mosaic_parts.plain_memory import PlainMemory


def scratch(shape: Geometry) -> dict[str, Any]:
    """Shared memory as the GPU's, and for each warpgroup two decoded units."""
    tuning = shape.tuning
    return {
        "w_smem": plgpu.SMEM((tuning.stages, tuning.row_units, tuning.k_units * WORD_ROWS, 32), jnp.uint32),
        "x_smem": plgpu.SMEM(
            (shape.subtiles, tuning.stages * tuning.widest, shape.line), shape.x_dtype, transforms=shape.x_transforms
        ),
        "operand_smem": plgpu.SMEM(
            (tuning.warpgroups, 2, 64, shape.line), shape.x_dtype, transforms=shape.x_transforms
        ),
        "full": plgpu.Barrier(num_arrivals=1 + shape.subtiles, num_barriers=tuning.stages),
        "empty": plgpu.Barrier(num_arrivals=tuning.warpgroups, num_barriers=tuning.stages),
    }


@dataclasses.dataclass(frozen=True)
class RingSteps(PlainMemory):
    """The steps that don't depend on the weights."""

    empty: Any

    def fill(self, ring: Ring, tile: Tile, step: Any) -> None:
        used_before = tile.count * self.shape.k_steps + step >= self.shape.tuning.stages
        pl.when(used_before)(lambda: plgpu.barrier_wait(self.empty.at[ring.slot]))
        self.copy(ring, tile, step)

    def drain(self, filled: Any) -> None:
        """Waits for the last release of every slot: the interpreter wants each completed phase to have been seen."""
        for slot in range(self.shape.tuning.stages):
            pl.when(filled > slot)(functools.partial(plgpu.barrier_wait, self.empty.at[slot]))

    def release(self, slot: Any, condition: Any) -> None:
        pl.when(jnp.bool_(condition))(lambda: plgpu.barrier_arrive(self.empty.at[slot]))

    def zeros(self, width: int) -> Any:
        return jnp.zeros((64, width), jnp.float32)

    def add(self, total: Any, partial: Any) -> Any:
        return total + partial

    def store(self, warpgroup: Any, tile: Tile, accumulators: list[Any]) -> None:
        for unit, accumulator in enumerate(accumulators):
            self.store_unit(accumulator, tile, 0, self.shape.out_column(tile, warpgroup, unit))


@dataclasses.dataclass(frozen=True)
class PlainSteps(RingSteps):
    """As `NativeSteps`."""

    operand_smem: Any

    def operand(self, ring: Ring, warpgroup: Any, unit: int, subtile: int, index: int, constants: Any) -> Any:
        """The decoded weights, in one of the warpgroup's two buffers: the product before may still read the other."""
        del constants
        row_unit = pl.ds(warpgroup * self.shape.tuning.units + unit, 1)
        each = self.shape.line // 64
        units = [self.decoded(ring, row_unit, k)[0] for k in range(subtile * each, (subtile + 1) * each)]
        target = self.operand_smem.at[warpgroup, index % 2]
        target[...] = jnp.concatenate(units, axis=1)
        plgpu.commit_smem()
        return target
