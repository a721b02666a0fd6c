"""The Hopper kernel of bfloat16 weights compiled for sm_90a without a GPU: its instructions, what it uses, no spill."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest
from annotations import unchecked_annotations
from hlo import Program
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax import GatedMLP
from pallas_kernels import Activation, Situ, SwiGLU
from pallas_kernels.grouped_matmul.config import SHARED_MEMORY
from pallas_kernels.grouped_matmul.hopper.dense_config import choose_tuning
from pallas_kernels.grouped_matmul.mosaic_hopper_dense import grouped_matmul

KIMI = Situ(4.0, 25.0)


@dataclasses.dataclass(frozen=True)
class Case:
    """One compilation of `rows` rows of x over weights `[groups, n, k]`."""

    rows: int
    groups: int
    n: int
    k: int
    activation: Activation | None = None
    out_format: Literal["bf16", "f32"] = "bf16"
    fine_sums: bool = False
    has_addend: bool = False


CASES = [
    Case(1, 1, 12288, 7168, KIMI),
    Case(64, 1, 12288, 7168, KIMI),
    Case(1024, 1, 12288, 7168, KIMI),
    Case(8192, 1, 7168, 6144),
    Case(48, 1, 3584, 7168),
    Case(1024, 1, 3584, 7168, fine_sums=True),
    Case(8, 1, 3584, 7168, out_format="f32"),
    Case(8, 1, 7168, 3584, has_addend=True),
    Case(8192, 1, 7168, 3584, has_addend=True),
    Case(200, 6, 480, 768, SwiGLU()),
    Case(200, 6, 480, 768),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_program_is_the_one_we_think_it_is(
    case: Case, hopper: jax.sharding.Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(hopper, PartitionSpec()))
        for shape, dtype in (
            ((case.rows, case.k), jnp.bfloat16),
            ((case.groups, case.n, case.k), jnp.bfloat16),
            ((case.groups,), jnp.int32),
            ((case.rows, case.n), jnp.bfloat16),
        )
    ]
    static = {name: getattr(case, name) for name in ("activation", "out_format", "fine_sums")}
    static["multiprocessors"] = 132
    with jax.set_mesh(hopper), unchecked_annotations():
        call = jax.jit(grouped_matmul, static_argnames=tuple(static))
        *operands, addend = arguments
        program = (
            call.trace(*operands, addend=addend if case.has_addend else None, **static)
            .lower(lowering_platforms=("cuda",))
            .compile()
        )
    (ptx,) = (file.read_text() for file in tmp_path.glob("*.ptx"))
    (report,) = (file.read_text() for file in tmp_path.glob("*.ptxas"))
    (resources,) = (file.read_text() for file in tmp_path.glob("*.resources.txt"))

    assert ".target sm_90a" in ptx
    gated = case.activation is not None
    tuning = choose_tuning(case.rows, case.groups, case.n, case.k, gated, fine_sums=case.fine_sums)
    products = set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)(\S+)", ptx))
    assert products == {(str(width), "k16.f32.bf16.bf16") for width in tuning.widths}
    assert len(re.findall(r"wgmma\.mma_async", ptx)) == 4 * tuning.k_units * tuning.units * len(tuning.widths)
    # One tensor copy brings gate and up, whose chunks are two more dimensions; that of a single group is none.
    copies = set(re.findall(r"cp\.async\.bulk\.tensor\.(\d)d", ptx))
    assert copies == {"2", str((5 if gated else 3) - (case.groups == 1))}
    assert ("ld.global" in ptx) == (case.groups > 1 or case.has_addend)  # of the groups' sizes
    assert ("ld.global.v4.b32" in ptx) == case.has_addend
    assert ("tanh" in ptx) == isinstance(case.activation, Situ)
    assert ("ex2.approx" in ptx or "tanh" in ptx) == gated
    assert ("stmatrix" in ptx) == (case.out_format != "f32")
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    found = re.search(r"smem_scratch_bytes=(\d+)", resources)
    assert found is not None
    assert int(found[1]) <= SHARED_MEMORY
    assert program.memory_analysis().temp_size_in_bytes <= 1 << 20  # and no second copy of the weights


@pytest.mark.parametrize("tokens", [1, 64])
def test_the_shared_experts_are_two_kernels_and_nothing_else(
    tokens: int, hopper: Mesh, choose_for: Callable[[Mesh], None]
) -> None:
    """No rows are added to a single one; nothing is converted or copied between the kernels, or after."""
    choose_for(hopper)
    with unchecked_annotations(), jax.set_mesh(hopper):
        weights: Any = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 6144, 7168), (7168, 6144))]
        layer = GatedMLP(*weights, activation=KIMI)
        x = jax.ShapeDtypeStruct((tokens, 7168), jnp.bfloat16)
        lowered = jax.jit(GatedMLP.__call__).trace(layer, x).lower(lowering_platforms=("cuda",))
        program = Program(lowered.compile().as_text())
    run = [program.instructions[name].op for name in program.entry]
    assert [op for op in run if op not in ("parameter", "constant", "bitcast")] == ["custom-call"] * 2
    assert program.custom_calls["mosaic_gpu_v2"] == 2
