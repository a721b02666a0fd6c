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

from pallas_kernels import MXFP8Array, TokenScaledArray
from pallas_kernels.row_kernels import mosaic_moves, mosaic_spread

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


@pytest.mark.parametrize("form", ["bf16", "mxfp8", "fp8_token"])
def test_a_token_is_read_once_and_written_to_each_of_its_rows(
    form: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))

    def gather(positions: jax.Array, *leaves: jax.Array) -> Any:
        x: Any = leaves[0] if form == "bf16" else (MXFP8Array if form == "mxfp8" else TokenScaledArray)(*leaves)
        return mosaic_moves.gather_rows(x, positions, 1024)

    values = (64, 3584), jnp.bfloat16 if form == "bf16" else jnp.float8_e4m3fn
    scales = {"bf16": (), "mxfp8": (((64, 112), jnp.uint8),), "fp8_token": (((64, 1), jnp.float32),)}[form]
    ptx = ptx_of(gather, (((64, 16), jnp.int32), values, *scales), target, tmp_path)
    assert sorted(re.findall(r"ld\.global\S*", ptx)) == [WIDE] + [NUMBER] * (16 + len(scales))
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == 16
    assert len(re.findall(r"st\.global\S*", ptx)) == 16 * (1 + len(scales))


@pytest.mark.parametrize("form", ["bf16", "fp8_token"])
def test_a_token_is_asked_for_before_ids_are_counted(
    form: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    operands = ((64, 3584), jnp.bfloat16), ((64, 16), jnp.int32)
    ptx = ptx_of(lambda x, ids: mosaic_spread.spread_rows(x, ids, 896, form), operands, target, tmp_path)
    assert re.findall(r"ld\.global\S*", ptx) == [WIDE] * 4 + [NUMBER] + ["ld.global.nc.v4.b32"] * 2
    assert ptx.rindex("ld.global") < ptx.index("redux.sync")
    assert not re.search(r"\b(atom|red)\.", ptx), "nothing depends on the order of blocks"


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
