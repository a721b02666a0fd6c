"""From global to shared memory: what one thread starts to fill a stage of the pipeline."""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.grouped_matmul.config import LINE_BYTES
from pallas_kernels.grouped_matmul.mosaic_parts.decode import UNIT_BYTES
from pallas_kernels.grouped_matmul.mosaic_parts.geometry import Geometry
from pallas_kernels.grouped_matmul.mosaic_parts.ptx import (
    Value,
    add,
    arith,
    constant,
    equal,
    i64,
    mul,
    ptx,
    utils,
    wide,
)


def copy_weights(
    shape: Geometry, source: Value, smem: Value, slot: Value, unit: Value, k_unit: Value, full: Value
) -> None:
    """One bulk copy for each of the tile's units of rows: their columns of a stage are contiguous."""
    tuning = shape.tuning
    size = tuning.k_units * UNIT_BYTES
    for r in range(tuning.row_units):
        line = arith.muli(wide(add(unit, r)), arith.constant(i64(), shape.k // 64 * UNIT_BYTES))
        at = arith.addi(source, arith.addi(line, wide(mul(k_unit, UNIT_BYTES))))
        target = add(smem, mul(add(mul(slot, tuning.row_units), r), size))
        code = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
        ptx(code, target, at, constant(size), full)


def copy_rows(
    ctx: Any,
    shape: Geometry,
    x_gmem: Value,
    x_smem: Value,
    slot: Value,
    k_unit: Value,
    row: Value,
    width: Value,
    full: Value,
) -> None:
    """One tensor copy of `width` rows for each 128 bytes of a stage, from any row on; zeros beyond x.

    The hardware wants a copy's size in its description: there is one for each of the tile's widths.
    """
    barrier = barrier_at(full)
    block = as_index(mul(slot, shape.tuning.widest // 8))

    def copy(rows: int) -> None:
        for s in range(shape.subtiles):
            # In memory x_smem is [subtiles, stages * widest / 8, 1, 8, line].
            tile = utils.memref_slice(x_smem, (s, mgpu.ds(block, rows // 8), 0))
            column = add(mul(k_unit, 64), s * shape.line)
            ctx.async_copy(
                src_ref=x_gmem,
                dst_ref=utils.memref_fold(tile, 0, 2),
                gmem_slice=(mgpu.ds(as_index(row), rows), mgpu.ds(as_index(column), shape.line)),
                swizzle=LINE_BYTES,
                barrier=barrier,
                arrive=False,
                predicate=None,
            )

    if len(shape.tuning.widths) == 1:
        copy(shape.tuning.widest)
        return
    for rows in shape.tuning.widths:
        with utils.when(equal(width, rows)):
            copy(rows)


def barrier_at(address: Value) -> Any:
    """The barrier at a shared address, as Mosaic's copies take one."""
    pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), wide(address))
    return utils.BarrierRef(pointer, constant(0), None, 1)


def as_index(value: Value) -> Value:
    return arith.index_castui(ir.IndexType.get(), value)
