"""Mosaic's kernels that gather rows and add them up, compiled without a GPU: what they read and write, and no spill."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from annotations import unchecked_annotations
from compiled_mosaic import Target
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.row_kernels import mosaic_moves

WIDE, NUMBER = "ld.global.nc.L1::no_allocate.v4.b32", "ld.global.nc.b32"


def ptx_of(function: Any, operands: tuple[Any, ...], target: Target, folder: Path) -> str:
    """The one kernel's, after a look at what the assembler and XLA say of it."""
    sharding = NamedSharding(target.mesh, PartitionSpec())
    placed = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in operands]
    with jax.set_mesh(target.mesh), unchecked_annotations():
        program = jax.jit(function).trace(*placed).lower(lowering_platforms=("cuda",)).compile()
    (ptx,) = (file.read_text() for file in folder.glob("*.ptx"))
    (report,) = (file.read_text() for file in folder.glob("*.ptxas"))
    assert f".target {target.architecture}" in ptx
    assert "mma" not in ptx
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    assert program.memory_analysis().temp_size_in_bytes < 1024
    return ptx


@pytest.mark.parametrize("rows", [128, 131072])
def test_rows_are_copied_sixteen_bytes_at_a_time(
    rows: int, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    operands = ((rows // 16, 3584), jnp.bfloat16), ((rows,), jnp.int32)
    ptx = ptx_of(mosaic_moves.gather_rows, operands, target, tmp_path)
    each = 1 if rows == 128 else 2
    assert sorted(re.findall(r"ld\.global\S*", ptx)) == [WIDE] * each + [NUMBER] * each
    assert len(re.findall(r"st\.global\S*", ptx)) == len(re.findall(r"st\.global\.v4\.b32", ptx)) == each


@pytest.mark.parametrize(("tokens", "slots"), [(8, 16), (8192, 16), (64, 20)])
def test_all_rows_of_a_sum_are_asked_for_before_one_is_added(
    tokens: int, slots: int, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    shape = tokens, slots
    operands = ((tokens * slots, 3584), jnp.bfloat16), (shape, jnp.int32), (shape, jnp.float32)
    ptx = ptx_of(mosaic_moves.combine_rows, operands, target, tmp_path)
    assert sorted(re.findall(r"ld\.global\S*", ptx)) == [WIDE] * slots + [NUMBER] * 2 * slots
    assert len(re.findall(r"@wanted ld\.global", ptx)) == slots, "a row that nobody names is not read"
    assert len(re.findall(r"fma\.rn\.f32", ptx)) == 8 * slots
    assert len(re.findall(r"st\.global\S*", ptx)) == len(re.findall(r"st\.global\.v4\.b32", ptx)) == 2
    order = re.findall(r"(@wanted ld|fma)", ptx)
    assert order[:16] == ["@wanted ld"] * 16
