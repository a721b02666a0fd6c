"""The Blackwell kernel's steps as they run on the GPU: copies, decode and store, written through PTX."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_kernels.grouped_matmul.blackwell.config import SLAB_ROWS, BlackwellTuning
from pallas_kernels.grouped_matmul.config import LINE_BYTES, epilogue_bytes, table_words
from pallas_kernels.grouped_matmul.mosaic_parts import copies, decode, epilogue, tables
from pallas_kernels.grouped_matmul.mosaic_parts.decode import SCALAR, UNIT_BYTES
from pallas_kernels.grouped_matmul.mosaic_parts.geometry import Geometry, Ring, Tile
from pallas_kernels.grouped_matmul.mosaic_parts.ptx import (
    Value,
    add,
    await_phase,
    constant,
    equal,
    global_address,
    i32,
    left,
    less,
    mul,
    ptx,
    scalar,
    shared_address,
    thread,
    utils,
)


def scratch(shape: Geometry[BlackwellTuning]) -> dict[str, Any]:
    """Shared memory: the ring of weights and rows, the store's buffers, the ring's barriers, the schedule tables."""
    tuning = shape.tuning
    turned = tuning.slabs * epilogue_bytes(tuning.units, shape.gated)
    return {
        "w_smem": plgpu.SMEM((tuning.stages, tuning.row_units * tuning.k_units * UNIT_BYTES // 4), jnp.uint32),
        "x_smem": plgpu.SMEM(
            (shape.subtiles, tuning.stages * tuning.widest, shape.line), shape.x_dtype, transforms=shape.x_transforms
        ),
        "turn_smem": plgpu.SMEM((turned // 4,), jnp.uint32),
        "full": plgpu.SMEM((2 * tuning.stages,), jnp.uint32),
        "table": plgpu.SMEM((2 * table_words(shape.groups),), jnp.int32),
    }


@dataclasses.dataclass(frozen=True)
class NativeSteps:
    """One kernel's references, and what its roles do with them.

    The barriers of filled stages are the kernel's own: rows of x start anywhere, which Mosaic's tiled copies cannot,
    and its barriers cannot be handed to other copies.
    """

    shape: Geometry[BlackwellTuning]
    x_gmem: Any
    w_gmem: Any
    sizes_gmem: Any
    exponents_gmem: Any
    out_gmem: tuple[Any, ...]  # the result; values and scales of MXFP8
    w_smem: Any
    x_smem: Any
    turn_smem: Any
    full: Any
    table: Any

    def start(self) -> None:
        """Initialises the barriers and the schedule's tables; all threads of the block go on together."""
        shape = self.shape

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)
        def emit(ctx: Any, full: Value, sizes: Value, table: Value) -> None:
            del ctx
            index = ptx("mov.u32 $0, %tid.x;", out=i32())
            with utils.when(less(index, 32)):
                tables.build(shape, global_address(sizes), shared_address(table))
            with utils.when(equal(index, 0)):
                for stage in range(shape.tuning.stages):
                    ptx("mbarrier.init.shared::cta.b64 [$0], 1;", _barrier(full, constant(stage)))
                ptx("fence.mbarrier_init.release.cluster;")
            ptx("bar.sync 0;")

        emit(self.full, self.sizes_gmem, self.table)

    def constants(self) -> tuple[Any, ...]:
        return decode.opaque_factors()

    def locate(self, tile: Any, group: Any) -> tuple[Any, Any, Any, Any]:
        return tables.locate(self.shape, self.table, tile, group)

    def copy(self, ring: Ring, tile: Tile, step: Any) -> None:
        """One thread starts the copies of weights and rows for K step `step` to an empty slot."""
        shape, tuning = self.shape, self.shape.tuning
        unit = tile.group * (shape.n // 64) + tile.column * tuning.row_units
        width = shape.width(tile.rows)
        refs = (self.w_gmem, self.x_gmem, self.w_smem, self.x_smem, self.full)
        types = [plgpu.RefType()] * 5
        types[3] = plgpu.RefType(shape.x_transforms)

        @plgpu.inline_mgpu(arg_types=(*types, *(SCALAR,) * 5))
        def emit(ctx: Any, *args: Any) -> None:
            w_gmem, x_gmem, w_smem, x_smem, barriers = args[:5]
            slot, unit, k_unit, row, width = (scalar(v) for v in args[5:])
            with utils.when(equal(thread(), 0)):
                full = _barrier(barriers, slot)
                ptx(
                    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
                    full,
                    add(mul(width, LINE_BYTES * shape.subtiles), tuning.row_units * tuning.k_units * UNIT_BYTES),
                )
                copies.copy_weights(shape, global_address(w_gmem), shared_address(w_smem), slot, unit, k_unit, full)
                copies.copy_rows(ctx, shape, x_gmem, x_smem, slot, k_unit, row, width, full)

        emit(*refs, ring.slot, unit, step * tuning.k_units, tile.row, width)

    def await_full(self, ring: Ring) -> None:
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR))
        def emit(ctx: Any, full: Value, slot: Any, parity: Any) -> None:
            del ctx
            await_phase(_barrier(full, scalar(slot)), scalar(parity))

        emit(self.full, ring.slot, ring.parity)

    def operand(self, ring: Ring, slab: Any, k_unit: int, constants: Any) -> Any:
        """A slab's decoded weights `[128, 64]`, in registers: lane 32 * warp + 16 * unit + i has the unit's row 16 *
        warp + i, so that a thread has of both units what it has of one on Hopper."""
        tuning = self.shape.tuning
        layout = plgpu.Layout.TCGEN05

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), SCALAR, *(SCALAR for _ in constants)),
            return_type=plgpu.ShapeDtypeStruct((SLAB_ROWS, 64), jnp.bfloat16, layout=layout),
        )
        def emit(ctx: Any, w_smem: Value, first: Any, *factors: Any) -> Any:
            del ctx
            pair = ir.VectorType.get((2,), ir.BF16Type.get())
            single = ir.VectorType.get((1,), i32())
            registers = np.empty((8, 2 * tuning.units), object)
            for unit in range(tuning.units):
                at = mul(add(scalar(first), unit), tuning.k_units * UNIT_BYTES)
                base = add(add(shared_address(w_smem), at), k_unit * UNIT_BYTES)
                for (column, half), register in decode.unit_bf16(base, *(scalar(f) for f in factors)):
                    value = vector.bitcast(pair, vector.broadcast(single, register))
                    registers[column, 2 * unit + half] = value
            mgpu_layout = layout.to_mgpu()
            shaped = registers.reshape(mgpu_layout.registers_shape((SLAB_ROWS, 64)))
            return mgpu.FragmentedArray(_registers=shaped, _layout=mgpu_layout, _is_signed=None)

        return emit(self.w_smem, ring.slot * tuning.row_units + slab * tuning.units, *constants)

    def store(self, slab: Any, tile: Tile, first: Any, sums: Any) -> None:
        """Stores a slab's sums `[128, rows]` of the tile's rows from `first` on, as far as they exist."""
        shape = self.shape
        spec = epilogue.Store(sums.shape[1], shape.activation, shape.out_columns, shape.out_format)
        column = shape.out_column(tile, slab)
        where = (slab, tile.row + first, tile.row + tile.rows, column, self.exponents_gmem[tile.group])
        epilogue.store(spec, [sums], self.out_gmem, self.turn_smem, where, None)


def _barrier(barriers: Value, slot: Value) -> Value:
    return add(shared_address(barriers), left(slot, 3))
