"""Triton kernels compiled for GPUs that are not there: their PTX, and what the assembler says of it."""

import dataclasses
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from annotations import unchecked_annotations
from jax.sharding import NamedSharding, PartitionSpec

Gpus = Callable[[str, int], list[jax.Device]]  # the fixture of that name
KINDS = {80: "ampere", 90: "hopper", 100: "blackwell"}
SHARED_MEMORY = {80: 166_912, 90: 232_448, 100: 232_448}  # bytes that a block can have


@dataclasses.dataclass(frozen=True)
class Program:
    """One kernel: its PTX, its shared memory, and bytes of the assembler's spills to local memory."""

    ptx: str
    shared_memory: int
    spilled: int

    @property
    def products(self) -> set[str]:
        """The tensor cores' instructions in it, up to the shape."""
        found = re.findall(r"(wgmma\.mma_async|tcgen05\.mma\S*|mma\.sync)", self.ptx)
        return {name.replace("cta_group::1.", "").replace(".block32", "") for name in found}


def lower(call: Callable[..., Any], arguments: tuple[Any, ...], gpus: Gpus, target: int) -> Any:
    """`call` lowered for a GPU of compute capability `target`; `arguments` have shapes and dtypes."""
    mesh = jax.sharding.Mesh(gpus(KINDS[target], 1), ("device",))
    whole = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), arguments)
    with jax.set_mesh(mesh), unchecked_annotations():
        return jax.jit(call).trace(*placed).lower(lowering_platforms=("cuda",))


def program(call: Callable[..., Any], arguments: tuple[Any, ...], gpus: Gpus, target: int) -> Program:
    """The one Triton kernel of `call`, which nothing may have compiled before."""
    folder = Path(os.environ["JAX_TRITON_DUMP_DIR"])
    before = set(folder.glob("*"))
    lower(call, arguments, gpus, target)
    (dump,) = set(folder.glob("*")) - before
    (file,), (info,) = dump.glob("*.ptx"), dump.glob("*.compile_info")
    ptx = file.read_text()
    (name,) = re.findall(r"^\.target (\w+)", ptx, flags=re.MULTILINE)
    assembler = ["ptxas", "-v", "--gpu-name", name, str(file), "-o", os.devnull]
    report = subprocess.run(assembler, capture_output=True, text=True, check=True).stderr
    (spilled,) = re.findall(r"(\d+) bytes spill stores", report)
    (shared_memory,) = re.findall(r"shared_mem_bytes: (\d+)", info.read_text())
    assert name == f"sm_{target}{'a' if target >= 90 else ''}"
    return Program(ptx, int(shared_memory), int(spilled))
