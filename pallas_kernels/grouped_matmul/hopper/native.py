"""The Hopper kernel's steps as they run on the GPU: barriers, copies, decode and store, written through PTX.

The barriers are the kernel's own, because one arrival a warp is enough where Mosaic's take one a thread, and because
rows of x start anywhere, which Mosaic's tiled copies cannot.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.config import LINE_BYTES, epilogue_bytes, table_words
from pallas_kernels.grouped_matmul.mosaic_parts import copies, decode, epilogue, tables
from pallas_kernels.grouped_matmul.mosaic_parts.decode import SCALAR, UNIT_BYTES
from pallas_kernels.grouped_matmul.mosaic_parts.geometry import Geometry, Ring, Tile
from pallas_kernels.grouped_matmul.mosaic_parts.ptx import (
    Value,
    add,
    arith,
    await_phase,
    both,
    constant,
    equal,
    global_address,
    i32,
    left,
    less,
    mul,
    ptx,
    ptx_if,
    scalar,
    shared_address,
    thread,
    utils,
)


def scratch(shape: Geometry) -> dict[str, Any]:
    """Shared memory: the ring of weights and rows, the store's buffers, the barriers, the schedule tables."""
    tuning = shape.tuning
    return {
        "w_smem": plgpu.SMEM((tuning.stages, tuning.row_units * tuning.k_units * UNIT_BYTES // 4), jnp.uint32),
        "x_smem": plgpu.SMEM(
            (shape.subtiles, tuning.stages * tuning.widest, shape.line), shape.x_dtype, transforms=shape.x_transforms
        ),
        "turn_smem": plgpu.SMEM((tuning.warpgroups * epilogue_bytes(tuning.units, shape.gated) // 4,), jnp.uint32),
        "barriers": plgpu.SMEM((4 * tuning.stages,), jnp.uint32),
        "table": plgpu.SMEM((2 * table_words(shape.groups),), jnp.int32),
    }


@dataclasses.dataclass(frozen=True)
class NativeSteps:
    """One kernel's references, and what its roles do with them."""

    shape: Geometry
    x_gmem: Any
    w_gmem: Any
    sizes_gmem: Any
    exponents_gmem: Any
    scales_gmem: Any  # None without token scales
    out_gmem: tuple[Any, ...]  # the result; values and scales of MXFP8
    w_smem: Any
    x_smem: Any
    turn_smem: Any
    barriers: Any
    table: Any

    def start(self) -> None:
        """Initialises the barriers and the schedule's tables; all threads of the block go on together."""
        shape = self.shape

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)
        def emit(ctx: Any, barriers: Value, sizes: Value, table: Value) -> None:
            del ctx
            index = ptx("mov.u32 $0, %tid.x;", out=i32())
            with utils.when(less(index, 32)):
                self.build_tables(sizes, table)
            with utils.when(equal(index, 0)):
                for stage in range(shape.tuning.stages):
                    full, empty = _barrier_pair(barriers, constant(stage), shape)
                    ptx("mbarrier.init.shared::cta.b64 [$0], 1;", full)
                    ptx(f"mbarrier.init.shared::cta.b64 [$0], {4 * shape.tuning.warpgroups};", empty)
                ptx("fence.mbarrier_init.release.cluster;")
            ptx("bar.sync 0;")

        emit(self.barriers, self.sizes_gmem, self.table)

    def build_tables(self, sizes: Value, table: Value) -> None:
        """What `locate` searches; a warp's work."""
        tables.build(self.shape, global_address(sizes), shared_address(table))

    def constants(self) -> tuple[Any, ...]:
        return decode.opaque_factors() if self.shape.mma == "bf16" else ()

    def locate(self, tile: Any, group: Any) -> tuple[Any, Any, Any, Any]:
        return tables.locate(self.shape, self.table, tile, group)

    def fill(self, ring: Ring, tile: Tile, step: Any) -> None:
        """One thread waits for the slot, and starts the copies of weights and rows for K step `step`."""
        shape, tuning = self.shape, self.shape.tuning
        refs = (self.w_gmem, self.x_gmem, self.w_smem, self.x_smem, self.barriers)
        transforms: tuple[Any, ...] = ((), (), self.w_transforms, shape.x_transforms, ())
        types = [plgpu.RefType(each) for each in transforms]

        @plgpu.inline_mgpu(arg_types=(*types, *(SCALAR,) * 7))
        def emit(ctx: Any, *args: Any) -> None:
            w_gmem, x_gmem, w_smem, x_smem, barriers = args[:5]
            slot, parity, group, column, k_unit, row, width = (scalar(v) for v in args[5:])
            with utils.when(equal(thread(), 0)):
                full, empty = _barrier_pair(barriers, slot, shape)
                await_phase(empty, arith.xori(parity, constant(1)))  # at first of the phase before: no wait
                x_bytes = mul(width, LINE_BYTES * shape.subtiles)
                arrive = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
                ptx(arrive, full, add(x_bytes, self.weight_bytes))
                self.copy_weights(ctx, w_gmem, w_smem, (slot, group, column, k_unit), full)
                copies.copy_rows(ctx, shape, x_gmem, x_smem, slot, k_unit, row, width, full)

        k_unit = step * tuning.k_units
        emit(*refs, ring.slot, ring.parity, tile.group, tile.column, k_unit, tile.row, shape.width(tile.rows))

    @property
    def w_transforms(self) -> tuple[Any, ...]:
        """Of the weights' shared memory."""
        return ()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that fill a slot."""
        return self.shape.tuning.row_units * self.shape.tuning.k_units * UNIT_BYTES

    def copy_weights(self, ctx: Any, source: Value, target: Value, where: tuple[Value, ...], full: Value) -> None:
        """Starts the copies of weights; `where` is (slot, group, column block, first unit of K)."""
        del ctx
        shape = self.shape
        slot, group, column, k_unit = where
        unit = add(mul(group, shape.n // 64), mul(column, shape.tuning.row_units))
        copies.copy_weights(shape, global_address(source), shared_address(target), slot, unit, k_unit, full)

    def drain(self, filled: Any) -> None:
        """Nothing: a block may end while the consumers' last releases are on their way."""

    def await_full(self, ring: Ring) -> None:
        shape = self.shape

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR))
        def emit(ctx: Any, barriers: Value, slot: Any, parity: Any) -> None:
            del ctx
            await_phase(_barrier_pair(barriers, scalar(slot), shape)[0], scalar(parity))

        emit(self.barriers, ring.slot, ring.parity)

    def release(self, slot: Any, condition: Any) -> None:
        """Gives the slot back, one arrival a warp, where the condition holds."""
        shape = self.shape

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR))
        def emit(ctx: Any, barriers: Value, slot: Any, condition: Any) -> None:
            del ctx
            empty = _barrier_pair(barriers, scalar(slot), shape)[1]
            asked = arith.cmpi(arith.CmpIPredicate.ne, scalar(condition), constant(0))
            first = arith.andi(equal(both(thread(), 31), 0), asked)
            ptx_if(first, "mbarrier.arrive.release.cta.shared::cta.b64 _, [$0];", empty)

        emit(self.barriers, slot, jnp.int32(condition))

    def operand(self, ring: Ring, warpgroup: Any, unit: int, subtile: int, index: int, constants: Any) -> Any:
        """The decoded weights of a unit of the stage, in registers."""
        del index
        shape, tuning = self.shape, self.shape.tuning
        first = ring.slot * tuning.row_units + warpgroup * tuning.units + unit
        k_unit = subtile * shape.line // 64
        offset = first * (tuning.k_units * UNIT_BYTES) + k_unit * UNIT_BYTES
        return decode.decode(self.w_smem, offset, constants, shape.mma)

    def zeros(self, width: int) -> Any:
        return plgpu.layout_cast(jnp.zeros((64, width), jnp.float32), plgpu.Layout.WGMMA)

    def add(self, total: Any, partial: Any) -> Any:
        """`total + partial`, where it is written: nothing else ties these additions to the wait for the products."""

        @plgpu.inline_mgpu(
            arg_types=(plgpu.Layout.WGMMA,) * 2,
            return_type=plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
        )
        def emit(ctx: Any, total: Any, partial: Any) -> Any:
            del ctx
            return total + mgpu.fragmented_array.optimization_barrier(partial)

        return emit(total, partial)

    def store(self, warpgroup: Any, tile: Tile, accumulators: list[Any]) -> None:
        shape = self.shape
        spec = epilogue.Store(shape.tuning.widest, shape.activation, shape.out_columns, shape.out_format)
        column = shape.out_column(tile, warpgroup)
        where = (warpgroup, tile.row, tile.row + tile.rows, column, self.exponents_gmem[tile.group])
        epilogue.store(spec, accumulators, self.out_gmem, self.turn_smem, where, self.scales_gmem)


def _barrier_pair(barriers: Value, slot: Value, shape: Geometry) -> tuple[Value, Value]:
    """The addresses of a slot's two barriers: filled by the copies, emptied by the consumers."""
    full = add(shared_address(barriers), left(slot, 3))
    return full, add(full, 8 * shape.tuning.stages)
