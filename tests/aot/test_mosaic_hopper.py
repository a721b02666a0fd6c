"""The Hopper kernel compiled for sm_90a without a GPU: the instructions it must have, what it may use, and no spill."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from annotations import unchecked_annotations
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import Activation, KernelWeights, Situ, SwiGLU, TokenScaledArray
from pallas_kernels.grouped_matmul import tuned
from pallas_kernels.grouped_matmul.config import SHARED_MEMORY, Tuning, subtiles
from pallas_kernels.grouped_matmul.kernel_layout import UNIT_COLUMNS, UNIT_ROWS, WORD_ROWS, Mma
from pallas_kernels.grouped_matmul.mosaic_hopper import grouped_matmul
from pallas_kernels.grouped_matmul.mosaic_parts.geometry import WrittenFormat

KIMI = Situ(4.0, 25.0)
GROUPS = 112
SHAPES = {"w13": (6144, 3584), "w2": (3584, 3072)}
PRODUCT = {"bf16": "k16.f32.bf16.bf16", "e4m3": "k32.f32.e4m3.e4m3"}


@dataclasses.dataclass(frozen=True)
class Case:
    """One compilation: weights laid out for `mma` products, rows as a recipe keeps them."""

    shape: str
    mma: Mma
    rows: int
    activation: Activation | None = None
    token_scales: bool = False
    out_format: WrittenFormat = "bf16"


CASES = [
    Case("w13", "bf16", 128, KIMI),
    Case("w13", "bf16", 16384, KIMI),
    Case("w13", "bf16", 2048, KIMI, token_scales=True),
    Case("w13", "bf16", 128, SwiGLU()),
    Case("w2", "bf16", 128),
    Case("w2", "bf16", 65536, token_scales=True),
    Case("w13", "e4m3", 2048, KIMI, token_scales=True),
    Case("w2", "e4m3", 16384, token_scales=True),
    Case("w2", "bf16", 128, out_format="f32"),
    Case("w2", "bf16", 65536, token_scales=True, out_format="f32"),
    Case("w13", "bf16", 65536, KIMI, out_format="f32"),
    Case("w13", "bf16", 128, KIMI, out_format="mxfp8"),
    Case("w13", "bf16", 65536, KIMI, out_format="mxfp8"),
    Case("w2", "e4m3", 2048, token_scales=True, out_format="mxfp8"),
]
QUANTISED = "cvt.rn.satfinite.e4m3x2"


def compiled(case: Case, mesh: jax.sharding.Mesh) -> Any:
    n, k = SHAPES[case.shape]
    sharding = NamedSharding(mesh, PartitionSpec())

    def aval(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def call(values: jax.Array, scales: jax.Array, words: jax.Array, exponents: jax.Array, sizes: jax.Array) -> Any:
        x = TokenScaledArray(values, scales) if case.token_scales else values
        w = KernelWeights(words, exponents, case.mma, case.activation is not None)
        return grouped_matmul(x, w, sizes, activation=case.activation, out_format=case.out_format, multiprocessors=132)

    arguments = (
        aval((case.rows, k), jnp.float8_e4m3fn if case.token_scales else jnp.bfloat16),
        aval((case.rows, 1), jnp.float32),
        aval((GROUPS, n // UNIT_ROWS, k // UNIT_COLUMNS * WORD_ROWS, 32), jnp.uint32),
        aval((GROUPS,), jnp.int32),
        aval((GROUPS,), jnp.int32),
    )
    with jax.set_mesh(mesh), unchecked_annotations():
        return jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",)).compile()


def widths_of(ptx: str) -> tuple[int, ...]:
    return tuple(sorted({int(width) for width in re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)", ptx)}))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_program_is_the_one_we_think_it_is(
    case: Case, hopper: jax.sharding.Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    program = compiled(case, hopper)
    kernels, reports, resources = (
        [file.read_text() for file in tmp_path.glob(pattern)] for pattern in ("*.ptx", "*.ptxas", "*.resources.txt")
    )
    n, k = SHAPES[case.shape]
    tuning = tuned.choose(case.rows, GROUPS, n, k, case.mma, case.activation is not None).tuning
    assert sorted(map(widths_of, kernels)) == sorted(launch.widths for launch in tuning.launches)
    for ptx in kernels:
        (launch,) = (each for each in tuning.launches if widths_of(ptx) == each.widths)
        # Rows come by one tensor copy of each width for every 128 bytes of a stage's columns, weights by bulk copies.
        assert ptx.count("cp.async.bulk.tensor.2d") == len(launch.widths) * subtiles(launch.k_units, case.mma)
        assert len(re.findall(r"cp\.async\.bulk\.shared", ptx)) == launch.row_units
        assert ".target sm_90a" in ptx
        assert PRODUCT[case.mma] in ptx
        assert "cp.async.bulk" in ptx
        # The activation is chosen at compile time: its instructions are there exactly when it was asked for.
        assert ("tanh" in ptx) == isinstance(case.activation, Situ)
        assert ("ex2.approx" in ptx or "tanh" in ptx) == (case.activation is not None)
        assert (QUANTISED in ptx) == (case.out_format == "mxfp8")
        assert ("stmatrix" in ptx) == (case.out_format != "f32")

    assert len(reports) == len(resources) == len(kernels)
    assert all("0 bytes spill stores, 0 bytes spill loads" in report for report in reports)
    for text in resources:
        found = re.search(r"smem_scratch_bytes=(\d+)", text)
        assert found is not None
        assert int(found[1]) <= SHARED_MEMORY
    # Rows in another format are cast before the kernel; nothing else is kept.
    cast = case.rows * k * 2 if case.token_scales and case.mma == "bf16" else 0
    assert program.memory_analysis().temp_size_in_bytes <= cast + (1 << 20)


OTHERS = Tuning((40, 80), 2, 2, 4, 3, costs=(3, 4)), Tuning((40,), 4, 1, 4, 3, costs=(3,))
LAUNCHES = Tuning((152,), 2, 1, 4, 3, OTHERS, (6,))


def test_launches_of_one_call_write_one_result_of_two_arrays_and_keep_nothing(
    hopper: jax.sharding.Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setattr(tuned, "choose", lambda *sizes: tuned.Choice(LAUNCHES, "a test"))
    case = Case("w13", "e4m3", 16384, KIMI, token_scales=True, out_format="mxfp8")
    program = compiled(case, hopper)
    widths = [widths_of(file.read_text()) for file in tmp_path.glob("*.ptx")]
    assert sorted(widths) == [(40,), (40, 80), (152,)]
    assert all("0 bytes spill stores" in file.read_text() for file in tmp_path.glob("*.ptxas"))
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes <= 1 << 20
    assert " copy(" not in program.as_text()
