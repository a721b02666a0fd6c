"""A Mosaic kernel as the compiler wrote it, which an interpreter runs on NumPy."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ptx_interpreter
import pytest
from annotations import unchecked_annotations
from compiled_mosaic import Target
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray


class Kernel(NamedTuple):
    """The PTX of a function that is one kernel, how it is launched, and its outputs."""

    ptx: str
    launch: ptx_interpreter.Launch
    outputs: list[jax.ShapeDtypeStruct]

    def __call__(self, *inputs: NDArray[Any]) -> list[NDArray[Any]]:
        """All of the outputs, each element of which must be written."""
        results = self.words(*inputs)
        assert all(result.written.all() for result in results)
        return [
            result.words.view(output.dtype).reshape(output.shape)
            for result, output in zip(results, self.outputs, strict=True)
        ]

    def words(self, *inputs: NDArray[Any]) -> list[ptx_interpreter.Output]:
        sizes = [output.size * output.dtype.itemsize // 4 for output in self.outputs]
        return ptx_interpreter.run(self.ptx, inputs, sizes, self.launch)


def compiled(function: Any, operands: Any, target: Target, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """For operands of such shapes and dtypes, in the order of the kernel's references."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(folder))
    sharding = NamedSharding(target.mesh, PartitionSpec())
    placed = [jax.ShapeDtypeStruct(operand.shape, operand.dtype, sharding=sharding) for operand in operands]
    with jax.set_mesh(target.mesh), unchecked_annotations():
        traced = jax.jit(function).trace(*placed)
        traced.lower(lowering_platforms=("cuda",)).compile()
    (ptx,) = (file.read_text() for file in folder.glob("*.ptx"))
    (report,) = (file.read_text() for file in folder.glob("*.ptxas"))
    assert f".target {target.architecture}" in ptx
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    (blocks,) = set(re.findall(r"\bgrid=\((\d+),\)", str(traced.jaxpr)))
    (words,) = set(re.findall(r"Ref<smem>\{[iu]32\[(\d+)\]\}", str(traced.jaxpr))) or {"0"}
    (passes,) = (file.read_text() for file in folder.glob("*.mlir-passes.log"))
    launch = ptx_interpreter.Launch(int(blocks), int(words), _parameters(passes))
    return Kernel(ptx, launch, jax.tree.leaves(traced.out_info))


def _parameters(passes: str) -> list[int]:
    """Which of its references each of a kernel's parameters is: they are in the order of their first use.

    The launch has the references' addresses, values that are loaded, and so numbered, one after another.
    """
    arguments = re.findall(r"gpu\.launch_func .* args\((.*?)\) loc", passes)[-1]
    values = [int(value) for value in re.findall(r"%(\d+) : !llvm\.ptr", arguments)]
    return [sorted(values).index(value) for value in values]
