"""The Blackwell kernel compiled for sm_100a without a GPU; `test_mosaic_blackwell` runs this in its own process."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from annotations import unchecked_annotations
from compiled_mosaic import Target
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import Activation, KernelWeights, Situ, SwiGLU
from pallas_kernels.grouped_matmul.blackwell.config import SLAB_ROWS, choose_tuning
from pallas_kernels.grouped_matmul.config import SHARED_MEMORY
from pallas_kernels.grouped_matmul.kernel_layout import UNIT_COLUMNS, UNIT_ROWS, WORD_ROWS
from pallas_kernels.grouped_matmul.mosaic_blackwell import grouped_matmul
from pallas_kernels.grouped_matmul.mosaic_parts.geometry import WrittenFormat

KIMI = Situ(4.0, 25.0)
GROUPS = 112
SHAPES = {"w13": (6144, 3584), "w2": (3584, 3072)}
TENSOR_COLUMNS = 512  # of a multiprocessor's tensor memory
QUANTISED = "cvt.rn.satfinite.e4m3x2"


@dataclasses.dataclass(frozen=True)
class Case:
    shape: str
    rows: int
    activation: Activation | None = None
    out_format: WrittenFormat = "bf16"


CASES = [
    Case("w13", 128, KIMI),
    Case("w13", 2048, SwiGLU(), "mxfp8"),
    Case("w13", 16384, KIMI),
    Case("w2", 128),
    Case("w2", 2048, None, "f32"),
    Case("w2", 16384),
]


def compiled(case: Case, mesh: jax.sharding.Mesh) -> Any:
    n, k = SHAPES[case.shape]
    sharding = NamedSharding(mesh, PartitionSpec())

    def aval(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def call(x: jax.Array, words: jax.Array, exponents: jax.Array, sizes: jax.Array) -> Any:
        w = KernelWeights(words, exponents, "bf16", case.activation is not None)
        return grouped_matmul(x, w, sizes, activation=case.activation, out_format=case.out_format, multiprocessors=148)

    arguments = (
        aval((case.rows, k), jnp.bfloat16),
        aval((GROUPS, n // UNIT_ROWS, k // UNIT_COLUMNS * WORD_ROWS, 32), jnp.uint32),
        aval((GROUPS,), jnp.int32),
        aval((GROUPS,), jnp.int32),
    )
    with jax.set_mesh(mesh), unchecked_annotations():
        return jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",)).compile()


def products(ptx: str) -> tuple[set[str], set[tuple[int, int]]]:
    """The tensor cores' instructions in it, and (rows of N, rows of x) of each, from their descriptors."""
    found = re.findall(r"(tcgen05\.mma\S*) \[%\w+\], (\[?)a_desc\]?, b_desc, (%r\d+), %p\d+;", ptx)
    assert len(found) == ptx.count("tcgen05.mma")
    assert all(in_tensor_memory for _, in_tensor_memory, _ in found)  # the decoded weights
    words = [int(word) for _, _, name in found for word in re.findall(rf"mov\.b32 \t{name}, (\d+);", ptx)]
    return {name for name, _, _ in found}, {((word >> 24 & 31) * 16, (word >> 17 & 63) * 8) for word in words}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_program_is_the_one_we_think_it_is(
    case: Case, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    program = compiled(case, target.mesh)
    (ptx,) = (file.read_text() for file in tmp_path.glob("*.ptx"))
    (report,) = (file.read_text() for file in tmp_path.glob("*.ptxas"))
    (resources,) = (file.read_text() for file in tmp_path.glob("*.resources.txt"))

    assert ".target sm_100a" in ptx
    tuning = choose_tuning(case.rows, GROUPS, *SHAPES[case.shape], case.activation is not None)
    names, sizes = products(ptx)
    assert names == {"tcgen05.mma.cta_group::1.kind::f16"}
    assert sizes == {(SLAB_ROWS, width) for width in tuning.widths}
    assert SLAB_ROWS == 128  # 64 would leave half of the tensor cores idle
    assert "cp.async.bulk" in ptx
    assert {"tcgen05.st.sync.aligned.16x128b.x8.b32"} == set(re.findall(r"tcgen05\.st\S*", ptx))
    # The activation is chosen at compile time: its instructions are there exactly when it was asked for.
    assert ("tanh" in ptx) == isinstance(case.activation, Situ)
    assert ("ex2.approx" in ptx) == (case.activation is not None)
    assert (QUANTISED in ptx) == (case.out_format == "mxfp8")

    assert "0 bytes spill stores, 0 bytes spill loads" in report
    assert _number(r"Used (\d+) registers", report) * 128 * (tuning.slabs + tuning.decoders + 1) <= 65_536
    assert _number(r"smem_scratch_bytes=(\d+)", resources) <= SHARED_MEMORY
    assert _number(r"tmem_scratch_cols=(\d+)", resources) <= TENSOR_COLUMNS
    assert program.memory_analysis().temp_size_in_bytes == 0


def _number(pattern: str, text: str) -> int:
    (found,) = re.findall(pattern, text)
    return int(found)
