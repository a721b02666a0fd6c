"""How the grouped products store their sums, as the compiler wrote it, run on NumPy: what they become, and where."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_mosaic import Target, compiled_for
from format_truth import BLOCK, encode_mxfp8
from gemm_truth import activate
from interpreted_mosaic import compiled
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from numerics import as_float64, assert_same_bits, round_bf16
from numpy.typing import NDArray

from pallas_kernels import Activation, Situ, SwiGLU
from pallas_kernels.grouped_matmul.config import epilogue_bytes
from pallas_kernels.grouped_matmul.mosaic_parts import epilogue
from pallas_kernels.grouped_matmul.mosaic_parts.geometry import WrittenFormat

KIMI = Situ(4.0, 25.0)
ROWS, OUT_COLUMNS, WARPGROUPS = 160, 800, 2


@dataclasses.dataclass(frozen=True)
class Case:
    """Tiles of so many rows and, in each of two warpgroups, units of 64 rows of N."""

    units: int
    width: int
    out_format: WrittenFormat = "bf16"
    activation: Activation | None = None
    token_scales: bool = False
    partial: bool = False  # tiles end 8 columns before the second warpgroup's
    has_addend: bool = False

    @property
    def spec(self) -> epilogue.Store:
        return epilogue.Store(self.width, self.activation, OUT_COLUMNS, self.out_format, self.partial)

    @property
    def columns(self) -> int:
        """A warpgroup's, of the result."""
        return self.units * (64 if self.activation is None else 32)

    @property
    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        if self.out_format == "mxfp8":
            values = jax.ShapeDtypeStruct((ROWS, OUT_COLUMNS), jnp.float8_e4m3fn)
            return values, jax.ShapeDtypeStruct((ROWS, OUT_COLUMNS // BLOCK), jnp.uint8)
        dtype = jnp.float32 if self.out_format == "f32" else jnp.bfloat16
        return (jax.ShapeDtypeStruct((ROWS, OUT_COLUMNS), dtype),)


HOPPER_CASES = (
    Case(1, 8, token_scales=True),
    Case(2, 24, partial=True),
    Case(3, 40, token_scales=True),
    Case(1, 40, has_addend=True),
    Case(3, 24, token_scales=True, partial=True, has_addend=True),
    Case(1, 24, activation=KIMI),
    Case(2, 40, activation=SwiGLU(), token_scales=True),
    Case(3, 40, activation=KIMI, partial=True),
    Case(1, 40, "f32", token_scales=True),
    Case(2, 8, "f32"),
    Case(3, 24, "f32", partial=True),
    Case(2, 24, "f32", SwiGLU()),
    Case(3, 40, "f32", KIMI, token_scales=True),
    Case(1, 24, "mxfp8"),
    Case(3, 40, "mxfp8", token_scales=True),
    Case(1, 8, "mxfp8", SwiGLU()),
    Case(2, 40, "mxfp8", KIMI, token_scales=True),
    Case(3, 24, "mxfp8", SwiGLU()),
)
BLACKWELL_CASES = (Case(2, 32), Case(2, 24, "f32", KIMI), Case(2, 8, "mxfp8", SwiGLU()))
IN_TENSOR_MEMORY = compiled_for() == "blackwell"  # where a unit has 16 of a warp's 32 lanes, and another the others


def store_kernel(case: Case, tiles: int) -> Any:
    """float32 `[tiles, warpgroups, N, width]`, int32 `[tiles, 5]`, float32 `[rows]` where rows have scales and a first
    result `[rows, columns]` where it has an addend, to the case's results: a block stores a tile. Its integers are as
    in `tiles_of`."""
    layout, step = (plgpu.Layout.TCGEN05, 128) if IN_TENSOR_MEMORY else (plgpu.Layout.WGMMA, 64)

    def body(sums_gmem: Any, tiles_gmem: Any, *others: Any, turn_smem: Any) -> None:
        scales_gmem, others = (others[0], others[1:]) if case.token_scales else (None, others)
        addend_gmem, out_gmem = (others[0], others[1:]) if case.has_addend else (None, others)
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        sums = [sums_gmem.at[block, warpgroup, pl.ds(first, step)] for first in range(0, 64 * case.units, step)]
        accumulators = [plgpu.load(each, layout=layout, optimized=False) for each in sums]
        row, end, column, exponent, column_end = (tiles_gmem[block, i] for i in range(5))
        where: tuple[Any, ...] = (warpgroup, row, end, column + warpgroup * case.columns, exponent)
        where += (column_end,) if case.partial else ()
        epilogue.store(case.spec, accumulators, out_gmem, turn_smem, where, scales_gmem, addend_gmem)

    words = WARPGROUPS * epilogue_bytes(case.units, case.activation is not None) // 4
    return plgpu.kernel(
        body,
        out_type=case.results,
        scratch_types={"turn_smem": plgpu.SMEM((words,), jnp.uint32)},
        grid=(tiles,),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )


def tiles_of(case: Case) -> NDArray[Any]:
    """First row, end of the rows, first column, exponent, end of the columns: of a full tile, of one that ends within
    its rows, of one that ends within the first eight, of an empty one, and of one where the arrays end."""
    width, columns = case.width, WARPGROUPS * case.columns - 8 * case.partial
    tiles = [
        (3, 3 + width, 32, 0),
        (3 + width, 3 + width + width * 5 // 8, 0, -130),
        (100, 103, OUT_COLUMNS - WARPGROUPS * case.columns, 7),
        (110, 110, 0, 0),
        (ROWS - 5, ROWS, 64, -3),
    ]
    return np.array([(*tile, tile[2] + columns) for tile in tiles], np.int32)


def sums_of(case: Case, tiles: NDArray[Any]) -> NDArray[Any]:
    """`[tiles, warpgroups, N, width]`, numbers that a tile's exponent brings near one, or the least one near 2^-30; NaN
    beyond the end of a tile, and once within."""
    rng = np.random.default_rng(case.units * case.width)
    shape = len(tiles), WARPGROUPS, 64 * case.units, case.width
    sums = rng.standard_normal(shape) * np.exp(rng.uniform(-3, 2, shape))
    sums *= np.ldexp(1.0, np.minimum(-tiles[:, 3], 100))[:, None, None, None]
    for tile, (row, end) in enumerate(tiles[:, :2]):
        sums[tile, ..., end - row :] = np.nan
    sums[0, 1, 21, 2] = np.nan
    return sums.astype(np.float32)


def rows_of(case: Case, sums: NDArray[Any], factors: NDArray[Any]) -> NDArray[Any]:
    """float64 `[rows, columns]`, what a format then rounds, of sums `[warpgroups, N, width]` and a factor a row.

    With an activation 8 rows of N are the gate's and the next 8 up's.
    """
    rows = (sums.reshape(-1, case.width)[:, : len(factors)] * factors).T
    if case.activation is None:
        return rows.astype(np.float64)
    gate, up = np.moveaxis(round_bf16(rows).reshape(len(rows), WARPGROUPS * case.columns // 8, 2, 8), 2, 0)
    return activate(case.activation, gate, up).reshape(len(rows), WARPGROUPS * case.columns)


def expected(
    case: Case, sums: NDArray[Any], tiles: NDArray[Any], scales: NDArray[Any], addends: NDArray[Any]
) -> list[tuple[Any, Any]]:
    """Each result, and which of its elements are written."""
    truth, written = np.zeros((ROWS, OUT_COLUMNS)), np.zeros((ROWS, OUT_COLUMNS), bool)
    for tile, (row, end, column, exponent, column_end) in enumerate(tiles):
        factors = np.ldexp(np.float32(1), exponent) * scales[row:end]
        truth[row:end, column:column_end] = rows_of(case, sums[tile], factors)[:, : column_end - column]
        written[row:end, column:column_end] = True
    if case.out_format == "mxfp8":
        return [*zip(encode_mxfp8(round_bf16(truth)), (written, written[:, ::BLOCK]), strict=True)]
    if case.has_addend:
        truth = round_bf16(truth) + as_float64(addends)
    return [(truth.astype(case.results[0].dtype), written)]


# Where there is an activation: how far off an element may be, and which share of them. Sigmoid and tanh are float32's
# here, so that few results are rounded to another neighbour than float64's.
STEP = {"f32": 2**-17, "bf16": 2**-7, "mxfp8": 2**-3}
SHARE = {"f32": 1.0, "bf16": 0.01, "mxfp8": 0.01}


@pytest.mark.parametrize("case", BLACKWELL_CASES if IN_TENSOR_MEMORY else HOPPER_CASES, ids=str)
def test_sums_are_stored_as_rows(case: Case, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = tiles_of(case)
    sums = sums_of(case, tiles)
    given = sums
    if IN_TENSOR_MEMORY:
        given = sums.reshape(len(tiles), WARPGROUPS, 2, 4, 16, -1).swapaxes(2, 3).reshape(sums.shape)
    scales, operands = np.ones(ROWS, np.float32), [given, tiles]
    if case.token_scales:
        scales = np.random.default_rng(0).uniform(0.5, 2, ROWS).astype(np.float32)
        operands.append(scales)
    addends = np.random.default_rng(1).standard_normal((ROWS, OUT_COLUMNS)).astype(jnp.bfloat16)
    if case.has_addend:
        operands.append(addends)
    kernel = compiled(store_kernel(case, len(tiles)), operands, target, tmp_path, monkeypatch)
    sought_results = expected(case, sums, tiles, scales, addends)
    for result, (truth, written) in zip(kernel.words(*operands), sought_results, strict=True):
        touched = result.written.reshape(*truth.shape, truth.dtype.itemsize)
        np.testing.assert_array_equal(touched, np.broadcast_to(written[..., None], touched.shape))
        found, sought = result.words.view(truth.dtype).reshape(truth.shape)[written], truth[written]
        if case.activation is None or truth.dtype == np.uint8:
            assert_same_bits(found, sought)
        else:
            found, sought = as_float64(found), as_float64(sought)
            np.testing.assert_allclose(found, sought, rtol=STEP[case.out_format], atol=0)
            assert (found != sought)[~np.isnan(sought)].mean() <= SHARE[case.out_format]
