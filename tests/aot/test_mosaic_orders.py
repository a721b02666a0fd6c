"""Mosaic's kernels that order rows, compiled without a GPU: what they read, write and ask of a warp, and no spill."""

import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from annotations import unchecked_annotations
from compiled_mosaic import Target
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.row_kernels import mosaic_orders


def ptx_of(function: Any, shape: tuple[int, ...], dtype: Any, target: Target, folder: Path) -> str:
    """The one kernel's, after a look at what the assembler and XLA say of it."""
    x = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(target.mesh, PartitionSpec()))
    with jax.set_mesh(target.mesh), unchecked_annotations():
        program = jax.jit(function).trace(x).lower(lowering_platforms=("cuda",)).compile()
    (ptx,) = (file.read_text() for file in folder.glob("*.ptx"))
    (report,) = (file.read_text() for file in folder.glob("*.ptxas"))
    assert f".target {target.architecture}" in ptx
    assert not re.search(r"\b(atom|red)\.", ptx), "nothing depends on the order of blocks"
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    assert program.memory_analysis().temp_size_in_bytes < 1024
    return ptx


@pytest.mark.parametrize(("tokens", "columns", "k"), [(1, 896, 16), (1000, 112, 16), (3, 1024, 1024), (2, 5, 5)])
def test_a_score_is_read_once_and_a_loop_picks(
    tokens: int, columns: int, k: int, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    top_k = functools.partial(mosaic_orders.top_k, k=k)
    ptx = ptx_of(top_k, (tokens, columns), jnp.float32, target, tmp_path)
    assert re.findall(r"ld\.global\S*", ptx) == ["ld.global.nc.b32"] * -(-columns // 32)
    assert ptx.rindex("ld.global") < ptx.index("st.shared"), "all are asked for before one is used"
    require_a_loop_and_a_store_at_its_end(ptx, k)


def require_a_loop_and_a_store_at_its_end(ptx: str, k: int, arrays: int = 1) -> None:
    picks = len(re.findall(r"ld\.shared\.b32", ptx))
    assert 1 <= picks <= k, "a loop, which the compiler may unroll"
    assert len(re.findall(r"redux\.sync", ptx)) == 4 * picks
    assert len(re.findall(r"st\.global\.b32", ptx)) == arrays * -(-k // 32)


def test_weights_cost_the_loads_of_a_bias_and_one_of_what_was_picked(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    weigh = functools.partial(mosaic_orders.top_k_weights, k=16, renormalize=True, scale=2.5)
    ptx = ptx_of(lambda scores: weigh(scores, scores[0]), (1000, 896), jnp.float32, target, tmp_path)
    assert re.findall(r"ld\.global\S*", ptx) == ["ld.global.nc.b32"] * (2 * 896 // 32 + 1)
    assert len(re.findall(r"div\.rn\.f32", ptx)) == 1
    require_a_loop_and_a_store_at_its_end(ptx, 16, arrays=2)


@pytest.mark.parametrize(
    ("tokens", "picks", "groups", "wide_loads"),
    [(1, 16, 896, 1), (128, 16, 112, 4), (1024, 16, 112, 8), (8192, 16, 112, 16), (1031, 3, 300, 2)],
)
def test_slots_are_read_16_bytes_at_a_time_and_few_only_once(
    tokens: int,
    picks: int,
    groups: int,
    wide_loads: int,
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    schedule = functools.partial(mosaic_orders.schedule_rows, groups=groups)
    ptx = ptx_of(schedule, (tokens, picks), jnp.int32, target, tmp_path)
    wide, single = "ld.global.nc.v4.b32", "ld.global.nc.b32"
    loads = re.findall(r"ld\.global\S*", ptx)
    assert {*loads} == ({wide, single} if tokens * picks % 4 else {wide})
    assert loads.count(wide) == wide_loads
    assert loads.count(single) == wide_loads * (tokens * picks % 4)
    assert len(re.findall(r"redux\.sync\.add", ptx)) == 5, "two sums of a warp's threads, three of the block's warps"
