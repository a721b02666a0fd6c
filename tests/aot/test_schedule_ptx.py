"""The tables of tiles that a grouped product builds on the GPU, as the compiler wrote them, run on NumPy."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_mosaic import Target
from interpreted_mosaic import compiled
from jaxlib.mlir import ir

from pallas_kernels.grouped_matmul import schedule
from pallas_kernels.grouped_matmul.config import Tuning, table_words
from pallas_kernels.grouped_matmul.mosaic_parts import tables
from pallas_kernels.grouped_matmul.mosaic_parts.geometry import Geometry
from pallas_kernels.grouped_matmul.mosaic_parts.ptx import (
    Value,
    add,
    arith,
    i32,
    left,
    less,
    load_shared_32,
    ptx,
    scf,
    thread,
    utils,
)
from pallas_kernels.row_kernels.emitters import address
from pallas_kernels.row_kernels.mosaic_rows import block_kernel

LAUNCHES = (
    Tuning((152,), 2, 1, 4, 3, costs=(629,)),
    Tuning((24, 56, 104), 2, 2, 4, 3, costs=(310, 400, 640)),
    Tuning((40,), 4, 1, 4, 4, costs=(320,)),
)
PRICES = tuple(schedule.Prices(launch.widths, launch.costs) for launch in LAUNCHES)


def tables_kernel(shape: Geometry) -> Any:
    """int32 `[groups] -> [2 * table_words]`: what one warp of a block writes to shared memory."""
    words = 2 * table_words(shape.groups)

    def emit(block: Value, sizes: Value, result: Value, table: Value) -> None:
        del block
        branch = scf.IfOp(less(thread(), 32))
        with ir.InsertionPoint(branch.then_block):
            tables.build(shape, sizes, table)
            ptx("bar.warp.sync 0xffffffff;")

            @utils.fori(arith.constant(ir.IndexType.get(), words // 32), ())
            def _(i: Value, carry: tuple[()]) -> tuple[()]:
                at = add(left(arith.index_castui(i32(), i), 5), thread())
                ptx("st.global.b32 [$0], $1;", address(result, at, 4), load_shared_32(add(table, left(at, 2))))
                return carry

            scf.yield_([])

    out = (jax.ShapeDtypeStruct((words,), jnp.int32),)
    return block_kernel("tables", emit, out, 1, table_words=words)


def expected_tables(shape: Geometry, sizes: np.ndarray) -> np.ndarray:
    tiles = [schedule.row_tiles(int(size), shape.tuning.widest) * shape.column_blocks for size in sizes]
    if shape.launches:
        own = [schedule.cheapest(int(size), shape.launches) == shape.launch for size in sizes]
        tiles = [count * mine for count, mine in zip(tiles, own, strict=True)]
    past = table_words(shape.groups) - shape.groups
    ends, rows = np.cumsum(tiles), np.cumsum(sizes)
    return np.concatenate([ends, np.full(past, 0x7FFF_FFFF), rows, np.full(past, rows[-1])])


def sizes_of(kind: str, groups: int) -> np.ndarray:
    rng = np.random.default_rng(groups)
    return {
        "small": rng.integers(0, 200, groups),
        "edges": rng.choice([0, 1, 8, 24, 25, 40, 41, 56, 57, 104, 105, 152, 153, 304, 305, 4096], groups),
        "hot": np.where(np.arange(groups) == groups // 2, 8192, rng.integers(0, 90, groups)),
        "none": np.zeros(groups, int),
    }[kind].astype(np.int32)


@pytest.mark.parametrize(("groups", "launch"), [(1, None), (33, 1), (112, None), (112, 0), (112, 1), (112, 2)])
def test_tiles_and_rows_end_where_the_schedule_says(
    groups: int, launch: int | None, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = () if launch is None else PRICES
    number = launch or 0
    shape = Geometry(16384, groups, 6144, 3584, "e4m3", None, "bf16", LAUNCHES[number], several, number)
    words = functools.partial(sizes_of, groups=groups)
    kernel = compiled(tables_kernel(shape), [words("small")], target, tmp_path, monkeypatch)
    for kind in ("small", "edges", "hot", "none"):
        (found,) = kernel(words(kind))
        np.testing.assert_array_equal(found, expected_tables(shape, words(kind)), kind)
