"""What the warpgroups of a Hopper kernel do: one fills a ring of stages with copies, the others multiply and store.

`mosaic_hopper` has the picture. A kernel differs from another by its steps, which say how a stage is filled and what of
it the tensor cores read.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.hopper import products
from pallas_kernels.grouped_matmul.mosaic_parts.geometry import Geometry, Ring, Tile
from pallas_kernels.grouped_matmul.mosaic_parts.walk import for_each_tile


@runtime_checkable
class Steps(Protocol):
    """What differs between kernels, and between the GPU and the interpreter."""

    @property
    def x_smem(self) -> Any: ...

    def start(self) -> None: ...
    def constants(self) -> tuple[Any, ...]: ...
    def locate(self, tile: Any, group: Any) -> tuple[Any, Any, Any, Any]: ...
    def fill(self, ring: Ring, tile: Tile, step: Any) -> None: ...
    def drain(self, filled: Any) -> None: ...
    def await_full(self, ring: Ring) -> None: ...
    def release(self, slot: Any, condition: Any) -> None: ...
    def operand(self, ring: Ring, warpgroup: Any, unit: int, subtile: int, index: int, constants: Any) -> Any: ...
    def zeros(self, width: int) -> Any: ...
    def add(self, total: Any, partial: Any) -> Any: ...
    def store(self, warpgroup: Any, tile: Tile, accumulators: list[Any]) -> None: ...


def kernel(
    name: str,
    shape: Geometry[Any],
    make: Callable[..., Steps],
    scratch: dict[str, Any],
    inputs: tuple[str, ...],
    blocks: int,
    interpret: Any,
) -> Callable[..., Any]:
    """A kernel of `blocks` blocks of the steps `make(shape=, **references)`, whose operands have the names `inputs`.

    One of a call's several launches takes references to what all of them write after those, and has no results.
    """

    def body(*refs: Any, **memory: Any) -> None:
        operands = dict(zip(inputs, refs, strict=False))
        steps = make(shape=shape, **operands, out_gmem=refs[len(inputs) :], **memory)
        steps.start()
        role = lax.axis_index("warpgroup")
        consumers = shape.tuning.warpgroups
        pl.when(role == consumers)(functools.partial(_produce, shape, steps, blocks))
        pl.when(role < consumers)(functools.partial(_consume, shape, steps, blocks, role))

    body.__name__ = name
    return plgpu.kernel(
        body,
        out_type=() if shape.launches else shape.results,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=shape.tuning.warpgroups + 1,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        scratch_types=scratch,
    )


def _produce(shape: Geometry[Any], steps: Steps, blocks: int) -> None:
    plgpu.set_max_registers(shape.tuning.registers[1], action="decrease")

    def run(tile: Tile) -> None:
        def step(i: Any, ring: Ring) -> Ring:
            steps.fill(ring, tile, i)
            return shape.next(ring)

        lax.fori_loop(0, shape.k_steps, step, shape.ring_at(tile))

    steps.drain(for_each_tile(shape, steps, blocks, run) * shape.k_steps)


def _consume(shape: Geometry[Any], steps: Steps, blocks: int, warpgroup: Any) -> None:
    plgpu.set_max_registers(shape.tuning.registers[0], action="increase")
    constants = steps.constants()

    def run(tile: Tile) -> None:
        products.multiply(shape, steps, warpgroup, tile, constants)

    for_each_tile(shape, steps, blocks, run)
