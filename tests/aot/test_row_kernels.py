"""Mosaic's kernels for activations and quantisers, compiled without a GPU: what they must have, and what not."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from annotations import unchecked_annotations
from compiled_mosaic import Target
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import MXFP8Array, Situ, SwiGLU
from pallas_kernels.row_kernels import mosaic_rows

WIDE = "ld.global.nc.L1::no_allocate.v4.b32"
QUANTISED = "cvt.rn.satfinite.e4m3x2"
DECODED = "cvt.rn.f16x2.e4m3x2"
CHOSEN = {"copysign", "ex2.approx", QUANTISED, DECODED}  # what tells the kernels apart: tanh, sigmoid, to and from e4m3

Rows = Callable[[Any], Any]
# In tuples: a test's name must not depend on a set's order, which differs from process to process.
CASES: list[tuple[Rows, tuple[int, ...], tuple[str, ...]]] = [
    (functools.partial(mosaic_rows.gated, Situ(4.0, 25.0)), (16384, 6144), ("copysign", "ex2.approx")),
    (functools.partial(mosaic_rows.gated, SwiGLU()), (2, 5, 48), ("ex2.approx",)),
    (mosaic_rows.quantize_mxfp8, (16384, 3584), (QUANTISED,)),
    (mosaic_rows.quantize_fp8_token, (16384, 3584), (QUANTISED,)),
    (mosaic_rows.quantize_fp8_token, (3, 8192), (QUANTISED,)),  # the longest row that a warp holds
    (jax.vmap(mosaic_rows.quantize_fp8_token), (2, 5, 40), (QUANTISED,)),
    (mosaic_rows.dequantize_mxfp8, (16384, 3584), (DECODED,)),
]


@pytest.mark.parametrize(("function", "shape", "instructions"), CASES, ids=lambda value: str(value).split(" at ")[0])
def test_one_pass_over_the_rows_without_products_or_spills(
    function: Rows,
    shape: tuple[int, ...],
    instructions: tuple[str, ...],
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    sharding = NamedSharding(target.mesh, PartitionSpec())
    x: Any = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
    with jax.set_mesh(target.mesh), unchecked_annotations():
        if DECODED in instructions:
            values: Any = jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn, sharding=sharding)
            scales: Any = jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // 32), jnp.uint8, sharding=sharding)
            x = MXFP8Array(values, scales)
        program = jax.jit(function).trace(x).lower(lowering_platforms=("cuda",)).compile()
    (ptx,) = (file.read_text() for file in tmp_path.glob("*.ptx"))
    (report,) = (file.read_text() for file in tmp_path.glob("*.ptxas"))

    assert f".target {target.architecture}" in ptx
    assert "mma" not in ptx
    assert {name for name in CHOSEN if name in ptx} == set(instructions)
    # Sixteen bytes of bfloat16 a load or a store, and nothing else is read.
    loads = set(re.findall(r"ld\.global\S*", ptx))
    assert loads == ({"ld.global.nc.L1::no_allocate.v2.b32", "ld.global.nc.u8"} if DECODED in instructions else {WIDE})
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    assert program.memory_analysis().temp_size_in_bytes < 1024
