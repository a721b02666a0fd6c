"""What the Blackwell kernel's warps and warpgroups do, with barriers and tensor memory as Mosaic has them.

Steps, rings and barriers count on over a block's tiles. `mosaic_blackwell` has the picture.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul import schedule
from pallas_kernels.grouped_matmul.blackwell.config import REGISTERS, SLAB_ROWS, BlackwellTuning
from pallas_kernels.grouped_matmul.config import EPILOGUE_TOKENS
from pallas_kernels.grouped_matmul.kernel_layout import UNIT_COLUMNS
from pallas_kernels.grouped_matmul.mosaic_parts.geometry import Geometry, Ring, Tile
from pallas_kernels.grouped_matmul.mosaic_parts.walk import for_each_tile

_COPIES, _PRODUCTS = 0, 1  # warps of the last warpgroup
_BLOCK_REGISTERS = 65_536


@runtime_checkable
class Steps(Protocol):
    """What differs between the GPU and the interpreter."""

    @property
    def x_smem(self) -> Any: ...

    def start(self) -> None: ...
    def constants(self) -> tuple[Any, ...]: ...
    def locate(self, tile: Any, group: Any) -> tuple[Any, Any, Any, Any]: ...
    def copy(self, ring: Ring, tile: Tile, step: Any) -> None: ...
    def await_full(self, ring: Ring) -> None: ...
    def operand(self, ring: Ring, slab: Any, k_unit: int, constants: Any) -> Any: ...
    def store(self, slab: Any, tile: Tile, first: Any, sums: Any) -> None: ...


class Barriers(NamedTuple):
    """Each is named for what it announces."""

    empty: Any  # [stages]: the products that read the rows are done, and the weights were decoded for them
    decoded: Any  # [operands]: the decoders of all slabs have written it
    taken: Any  # [operands]: the products that read it are done
    summed: Any  # [accumulators]: the products of a tile are done
    stored: Any  # [accumulators]: the sums of all slabs have been read


def scratch(shape: Geometry[BlackwellTuning]) -> dict[str, Any]:
    """Tensor memory, sums `[set, slab, row]` and operands `[place, slab, column]` along its columns; the barriers."""
    tuning = shape.tuning
    sums = tuning.accumulators * tuning.slabs * tuning.sums_columns
    columns = tuning.operands * tuning.slabs * tuning.k_units * UNIT_COLUMNS

    def barrier(count: int, arrivals: int = 1) -> Any:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count, orders_tensor_core=True)

    return {
        "sums_tmem": plgpu.TMEM((SLAB_ROWS, sums), jnp.float32),
        "operand_tmem": plgpu.TMEM((SLAB_ROWS, columns), jnp.bfloat16, packed=True),
        "barriers": Barriers(
            empty=barrier(tuning.stages),
            decoded=barrier(tuning.operands, tuning.slabs),
            taken=barrier(tuning.operands),
            summed=barrier(tuning.accumulators),
            stored=barrier(tuning.accumulators, tuning.slabs),
        ),
    }


@dataclasses.dataclass(frozen=True)
class Block:
    """One block of the grid of `blocks`."""

    shape: Geometry[BlackwellTuning]
    steps: Steps
    blocks: int
    sums_tmem: Any
    operand_tmem: Any
    barriers: Barriers

    def store(self, slab: Any) -> None:
        """A warpgroup for each slab: from sums to rows of the result."""
        self._set_registers(0)
        width = min(EPILOGUE_TOKENS, self.shape.tuning.sums_columns)

        def run(tile: Tile) -> None:
            place = _ring_at(tile.count, self.shape.tuning.accumulators).slot
            plgpu.barrier_wait(self.barriers.summed.at[place])

            def chunk(i: Any, _: None) -> None:
                columns = self._sums(place, slab).start + i * width
                sums = plgpu.async_load_tmem(self.sums_tmem.at[:, pl.ds(columns, width)], layout=plgpu.Layout.TCGEN05)
                plgpu.wait_load_tmem()
                self.steps.store(slab, tile, i * width, sums)

            lax.fori_loop(0, schedule.quotient(tile.rows + (width - 1), width), chunk, None)
            plgpu.barrier_arrive(self.barriers.stored.at[place])

        self._for_each_tile(run)

    def decode(self, decoder: Any) -> None:
        """A warpgroup: one slab's part of every `turns`-th step, from codes in shared memory to tensor memory."""
        self._set_registers(1)
        tuning, k_steps = self.shape.tuning, self.shape.k_steps
        turn = schedule.quotient(decoder, tuning.slabs)
        slab = decoder - turn * tuning.slabs
        constants = self.steps.constants()

        def run(tile: Tile) -> None:
            before = tile.count * k_steps
            own = lax.rem(turn + tuning.turns - lax.rem(before, tuning.turns), tuning.turns)  # first step of the turn

            def step(i: Any, carry: tuple[Ring, Ring]) -> tuple[Ring, Ring]:
                ring, place = carry
                self.steps.await_full(ring)
                units = [self.steps.operand(ring, slab, k, constants) for k in range(tuning.k_units)]
                used = before + own + i * tuning.turns >= tuning.operands
                pl.when(used)(lambda: plgpu.barrier_wait(self.barriers.taken.at[place.slot]))
                for k, unit in enumerate(units):
                    plgpu.async_store_tmem(self.operand_tmem.at[:, self._operand(place.slot, slab, k)], unit)
                plgpu.commit_tmem()
                plgpu.barrier_arrive(self.barriers.decoded.at[place.slot])
                return _next(ring, tuning.stages, tuning.turns), _next(place, tuning.operands, tuning.turns)

            first = _ring_at(before + own, tuning.stages), _ring_at(before + own, tuning.operands)
            lax.fori_loop(0, schedule.quotient(k_steps - own + (tuning.turns - 1), tuning.turns), step, first)

        total = self._for_each_tile(run) * k_steps
        for place in range(tuning.operands):
            self._see(self.barriers.taken, place, (total > place) & (turn == place % tuning.turns))

    def copy_and_multiply(self) -> None:
        """A warpgroup of which two warps work, one thread of each mostly."""
        self._set_registers(2)

        @plgpu.warp_map
        def _(warp: Any) -> None:
            pl.when(warp == _COPIES)(self._copy)
            pl.when(warp == _PRODUCTS)(self._multiply)

    def _copy(self) -> None:
        tuning, k_steps = self.shape.tuning, self.shape.k_steps

        def run(tile: Tile) -> None:
            def step(i: Any, ring: Ring) -> Ring:
                used = tile.count * k_steps + i >= tuning.stages
                pl.when(used)(lambda: plgpu.barrier_wait(self.barriers.empty.at[ring.slot]))
                self.steps.copy(ring, tile, i)
                return _next(ring, tuning.stages)

            lax.fori_loop(0, k_steps, step, self.shape.ring_at(tile))

        total = self._for_each_tile(run) * k_steps
        for stage in range(tuning.stages):
            self._see(self.barriers.empty, stage, total > stage)

    def _multiply(self) -> None:
        tuning, k_steps = self.shape.tuning, self.shape.k_steps

        def run(tile: Tile) -> None:
            place = _ring_at(tile.count, tuning.accumulators).slot
            used = tile.count >= tuning.accumulators
            pl.when(used)(lambda: plgpu.barrier_wait(self.barriers.stored.at[place]))
            chosen = schedule.narrowest(tile.rows, tuning.widths)

            def step(i: Any, carry: tuple[Ring, Ring]) -> tuple[Ring, Ring]:
                ring, operand = carry
                self.steps.await_full(ring)
                plgpu.barrier_wait(self.barriers.decoded.at[operand.slot])
                for index, width in enumerate(tuning.widths):  # a warp has no `switch`
                    start = functools.partial(self._products, place, ring.slot, operand.slot, i > 0, width)
                    pl.when(chosen == index)(start)
                plgpu.tcgen05_commit_arrive(self.barriers.empty.at[ring.slot])
                plgpu.tcgen05_commit_arrive(self.barriers.taken.at[operand.slot])
                return _next(ring, tuning.stages), _next(operand, tuning.operands)

            first = self.shape.ring_at(tile), _ring_at(tile.count * k_steps, tuning.operands)
            lax.fori_loop(0, k_steps, step, first)
            plgpu.tcgen05_commit_arrive(self.barriers.summed.at[place])

        total = self._for_each_tile(run)
        for place in range(tuning.accumulators):
            self._see(self.barriers.stored, place, total > place)

    def _products(self, place: Any, stage: Any, operand: Any, further: Any, width: int) -> None:
        """Starts `sums[:, :width] += weights @ x.T` of a stage; the first of a tile overwrite."""
        tuning = self.shape.tuning
        for slab in range(tuning.slabs):
            sums = self.sums_tmem.at[:, pl.ds(self._sums(place, slab).start, width)]
            for k in range(tuning.k_units):
                rows = self.steps.x_smem.at[k, pl.ds(stage * tuning.widest, width)]
                weights = self.operand_tmem.at[:, self._operand(operand, slab, k)]
                plgpu.tcgen05_mma(sums, weights, rows.transpose((1, 0)), accumulate=True if k else further)

    def _sums(self, place: Any, slab: Any) -> Any:
        columns = self.shape.tuning.sums_columns
        return pl.ds((place * self.shape.tuning.slabs + slab) * columns, columns)

    def _operand(self, place: Any, slab: Any, k_unit: int) -> Any:
        tuning = self.shape.tuning
        return pl.ds(((place * tuning.slabs + slab) * tuning.k_units + k_unit) * UNIT_COLUMNS, UNIT_COLUMNS)

    def _for_each_tile(self, run: Any) -> Any:
        return for_each_tile(self.shape, self.steps, self.blocks, run)

    def _see(self, barriers: Any, place: int, completed: Any) -> None:
        """Waits for a barrier's last phase: nothing is on its way when the block ends, and the interpreter asks it."""
        pl.when(completed)(lambda: plgpu.barrier_wait(barriers.at[place]))

    def _set_registers(self, role: int) -> None:
        tuning = self.shape.tuning
        at_start = _BLOCK_REGISTERS // (128 * (tuning.slabs + tuning.decoders + 1)) // 8 * 8
        count = REGISTERS[tuning.slabs, tuning.decoders][role]
        plgpu.set_max_registers(count, action="increase" if count >= at_start else "decrease")


def _ring_at(count: Any, size: int) -> Ring:
    """Where a ring of `size` places is after `count` steps."""
    turns = lax.div(count, jnp.int32(size))
    return Ring(count - turns * size, lax.rem(turns, jnp.int32(2)))


def _next(ring: Ring, size: int, steps: int = 1) -> Ring:
    following = ring.slot + steps
    wraps = following >= size
    return Ring(jnp.where(wraps, following - size, following), jnp.where(wraps, 1 - ring.parity, ring.parity))
