"""A kernel's memory, copies, decode and store in plain operations, for Mosaic's interpreter.

Weights are decoded by ordinary array operations, since the interpreter knows no inline PTX. The barriers are Mosaic's,
so that its race detector sees them.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import e8m0
from pallas_kernels.grouped_matmul import kernel_layout, schedule
from pallas_kernels.grouped_matmul.kernel_layout import WORD_ROWS
from pallas_kernels.grouped_matmul.mosaic_parts.geometry import Geometry, Ring, Tile
from pallas_kernels.mxfp8 import quantize_mxfp8
from pallas_kernels.rounding import to_bfloat16


@dataclasses.dataclass(frozen=True)
class PlainMemory:
    """A kernel's references, and what roles do with them whichever tensor cores multiply."""

    shape: Geometry
    x_gmem: Any
    w_gmem: Any
    sizes_gmem: Any
    exponents_gmem: Any
    scales_gmem: Any
    out_gmem: tuple[Any, ...]
    w_smem: Any
    x_smem: Any
    full: Any

    def start(self) -> None:
        """Nothing: Mosaic's barriers are ready."""

    def constants(self) -> tuple[Any, ...]:
        return ()

    def locate(self, tile: Any, group: Any) -> tuple[Any, Any, Any, Any]:
        """As `tables.locate`, one group after the other from the first."""
        del group
        last = self.shape.groups - 1

        def beyond(carry: tuple[Any, ...]) -> Any:
            group, first_tile, _, size = carry
            return (group <= last) & (tile >= first_tile + self.shape.tiles(size))

        def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            group, first_tile, first_row, size = carry
            following = self.sizes_gmem[jnp.minimum(group + 1, last)]
            return group + 1, first_tile + self.shape.tiles(size), first_row + size, following

        zero = jnp.int32(0)
        return lax.while_loop(beyond, step, (zero, zero, zero, self.sizes_gmem[0]))

    def copy(self, ring: Ring, tile: Tile, step: Any) -> None:
        """Starts the copies of weights and rows for K step `step` to an empty slot."""
        tuning = self.shape.tuning
        self.copy_weights(ring, tile, step)

        def rows(width: int) -> None:
            for s in range(self.shape.subtiles):
                column = (step * self.shape.subtiles + s) * self.shape.line
                plgpu.copy_gmem_to_smem(
                    self.x_gmem.at[pl.ds(tile.row, width), pl.ds(column, self.shape.line)],
                    self.x_smem.at[s, pl.ds(ring.slot * tuning.widest, width)],
                    self.full.at[ring.slot],
                )

        chosen = schedule.narrowest(tile.rows, tuning.widths)
        branches = [functools.partial(rows, width) for width in tuning.widths]
        branches[0]() if len(branches) == 1 else lax.switch(chosen, branches)

    def copy_weights(self, ring: Ring, tile: Tile, step: Any) -> None:
        tuning = self.shape.tuning
        unit = tile.column * tuning.row_units
        lines = tuning.k_units * WORD_ROWS
        plgpu.copy_gmem_to_smem(
            self.w_gmem.at[tile.group, pl.ds(unit, tuning.row_units), pl.ds(step * lines, lines)],
            self.w_smem.at[ring.slot],
            self.full.at[ring.slot],
        )

    def await_full(self, ring: Ring) -> None:
        plgpu.barrier_wait(self.full.at[ring.slot])

    def decoded(self, ring: Ring, row_units: Any, k_unit: int) -> jax.Array:
        """Units of the stage, at exponents relative to the expert's: `[units, 64, 64]` in x's dtype."""
        lines = self.w_smem[ring.slot, row_units, pl.ds(k_unit * WORD_ROWS, WORD_ROWS)]
        return jax.vmap(functools.partial(_decode, shape=self.shape))(lines)

    def store_unit(self, sums: Any, tile: Tile, first: Any, column: Any) -> None:
        """Stores a unit's sums `[64, rows]`, of the tile's rows from `first` on: those that exist."""
        results = self._results(sums.T * self.factor(tile), tile, first)

        def store_row(r: Any, _: None) -> None:
            for result, out in zip(results, self.out_gmem, strict=True):
                columns_each = self.shape.out_columns // out.shape[1]  # 32 for the scales of MXFP8
                row = lax.dynamic_index_in_dim(result, r, keepdims=False)
                self.store_row(out, tile, tile.row + first + r, column // columns_each, row)

        lax.fori_loop(0, jnp.minimum(tile.rows - first, sums.shape[1]), store_row, None)

    def factor(self, tile: Tile) -> Any:
        """What the sums count times."""
        return jnp.ldexp(jnp.float32(1), self.exponents_gmem[tile.group])

    def store_row(self, out: Any, tile: Tile, at: Any, column: Any, row: Any) -> None:
        """Stores a unit's columns of row `at` of the result."""
        del tile
        out[at, pl.ds(column, row.size)] = row

    def _results(self, y: Any, tile: Tile, first: Any) -> tuple[Any, ...]:
        """A unit's sums `[rows, 64]` in the result's format; rows that do not exist hold anything."""
        if self.scales_gmem is not None:
            last = self.shape.rows - 1
            rows = [jnp.minimum(tile.row + first + r, last) for r in range(y.shape[0])]
            y = y * jnp.stack([self.scales_gmem[row] for row in rows])[:, None]
        if self.shape.activation is not None:
            halves = to_bfloat16(y).astype(jnp.float32).reshape(-1, 4, 2, 8)
            gate, up = (halves[:, :, which].reshape(-1, 32) for which in range(2))
            y = self.shape.activation(gate, up)
        if self.shape.out_format == "f32":
            return (y,)
        if self.shape.out_format == "bf16":
            return (to_bfloat16(y),)
        q = quantize_mxfp8(to_bfloat16(y), implementation="reference")
        return q.values, q.scales


def _decode(lines: jax.Array, shape: Geometry) -> jax.Array:
    """One unit, uint32 `[17, 32]`, to its values at exponents relative to the expert's: `[64, 64]` in x's dtype."""
    codes, stored = kernel_layout.read_unit(lines.reshape(-1), shape.mma)
    code = codes.astype(jnp.int32)
    field = code & 7
    quarters = jnp.where(field < 2, 2 * field, (2 + (field & 1)) << (field >> 1))
    magnitude = quarters.astype(jnp.float32) * 0.25
    exponent = stored - 253 if shape.mma == "bf16" else stored // 8 - 5
    exponent = jnp.where(stored == 255, 0, exponent)  # "e4m3": a block of zeros beyond the span
    values = e8m0.times_power_of_two(jnp.where(code >= 8, -magnitude, magnitude), jnp.repeat(exponent, 32, axis=1))
    return values.astype(shape.x_dtype)
