"""The Hopper kernel's two main loops over K: what a consumer warpgroup does with the stages of one tile.

bfloat16 products are summed where the tensor cores leave them, in float32, towards zero: 7,168 columns lose 1e-5 of
what is typical of their sums. So those of dense weights start from zero every thousand columns or so, where registers
suffice for totals that take them up. Sums of e4m3 products are not left there: Hopper adds each product to a sum after
cutting it off at the sum's 2^-13, towards zero. Of one sign, 256 columns lose 1.3e-3 of their sum so, 3,584 lose
4.2e-2; of both, 1.7e-4 and 1.0e-3. So the sums of a stage start from zero, every 128 columns where registers suffice
and else every 256, and float32 totals take them up.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul import schedule
from pallas_kernels.grouped_matmul.config import Tuning
from pallas_kernels.grouped_matmul.mosaic_parts.geometry import Geometry, Ring, Tile


def multiply(shape: Geometry, steps: Any, warpgroup: Any, tile: Tile, constants: Any) -> None:
    """One tile, from its first stage to its store."""
    (_exact if shape.mma == "bf16" else _promoted)(shape, steps, warpgroup, tile, constants)


def _exact(shape: Geometry, steps: Any, warpgroup: Any, tile: Tile, constants: Any) -> None:
    """A unit is decoded while the product of the unit before runs, across the stages of a turn."""
    tuning, turns = shape.tuning, shape.turns
    units = [(subtile, unit) for subtile in range(shape.subtiles) for unit in range(tuning.units)]
    chosen = schedule.narrowest(tile.rows, tuning.widths)

    def accumulate(ring: Ring, tiles: Any, *accumulators: Any) -> tuple[Ring, Any, list[Any]]:
        def step(i: Any, carry: tuple[Ring, Any, Any]) -> tuple[Ring, Any, Any]:
            ring, before, tiles = carry
            steps.await_full(ring)
            for index, (subtile, unit) in enumerate(units):
                operand = steps.operand(ring, warpgroup, unit, subtile, index, constants)
                product = functools.partial(_product, steps, accumulators[unit], operand, subtile, tiles)
                _switch(chosen, [functools.partial(product, width) for width in tuning.widths])
                plgpu.wgmma_wait(1)
                if index == 0:
                    steps.release(before, i > 0)
            following = shape.next(ring)
            return following, ring.slot, _following_tiles(shape, following, tiles)

        ring, last, tiles = lax.fori_loop(0, shape.k_steps // turns, step, (ring, jnp.int32(0), tiles))
        plgpu.wgmma_wait(0)
        steps.release(last, True)
        return ring, tiles, [accumulator[...] for accumulator in accumulators]

    def turn(i: Any, carry: tuple[Ring, Any, list[Any]]) -> tuple[Ring, Any, list[Any]]:
        del i
        ring, tiles, totals = carry
        ring, tiles, sums = one_turn(ring, tiles)
        return ring, tiles, [steps.add(total, each) for total, each in zip(totals, sums, strict=True)]

    def one_turn(ring: Ring, tiles: Any) -> tuple[Ring, Any, list[Any]]:
        accumulators = [plgpu.ACC((64, tuning.widest), jnp.float32)] * tuning.units
        return pl.run_scoped(functools.partial(accumulate, ring, tiles), *accumulators)

    ring = shape.ring_at(tile)
    tiles = ring.slot * (tuning.widest // schedule.ROW_STEP)
    if turns == 1:
        _, _, totals = one_turn(ring, tiles)
    else:
        zeros = [steps.zeros(tuning.widest) for _ in range(tuning.units)]
        _, _, totals = lax.fori_loop(0, turns, turn, (ring, tiles, zeros))
    steps.store(warpgroup, tile, totals)


def _promoted(shape: Geometry, steps: Any, warpgroup: Any, tile: Tile, constants: Any) -> None:
    """Stage by stage; while one warpgroup waits for its sums and adds them up, the products of the others run."""
    tuning = shape.tuning
    chosen = schedule.narrowest(tile.rows, tuning.widths)

    def step(i: Any, carry: tuple[Ring, Any, list[Any]]) -> tuple[Ring, Any, list[Any]]:
        del i
        ring, tiles, totals = carry
        steps.await_full(ring)

        def partial_sums(unit: int, *sums: Any) -> list[Any]:
            for subtile in range(shape.subtiles):
                index = unit * shape.subtiles + subtile
                operand = steps.operand(ring, warpgroup, unit, subtile, index, constants)
                product = functools.partial(_product, steps, sums[subtile % len(sums)], operand, subtile, tiles)
                _switch(chosen, [functools.partial(product, width) for width in tuning.widths])
            return [each[...] for each in sums]

        added = []
        for unit, total in enumerate(totals):
            accumulators = [plgpu.ACC((64, tuning.widest), jnp.float32)] * _partial_sums(shape)
            for sums in pl.run_scoped(functools.partial(partial_sums, unit), *accumulators):
                total = steps.add(total, sums)
            added.append(total)
        steps.release(ring.slot, True)
        following = shape.next(ring)
        return following, _following_tiles(shape, following, tiles), added

    ring = shape.ring_at(tile)
    zeros = [steps.zeros(tuning.widest) for _ in range(tuning.units)]
    carry = ring, ring.slot * (tuning.widest // schedule.ROW_STEP), zeros
    _, _, totals = lax.fori_loop(0, shape.k_steps, step, carry)
    steps.store(warpgroup, tile, totals)


def _product(steps: Any, sums: Any, operand: Any, subtile: int, tiles: Any, width: int) -> None:
    """Starts `sums[:, :width] += operand @ x.T`, where x starts `8 * tiles` rows into the ring."""
    # A multiple of 8 times 8: the slot's offset is carried, because a 64-bit product would leave the uniform
    # registers, and the descriptors with it.
    rows = steps.x_smem.at[subtile, pl.ds((tiles * 8).astype(jnp.uint32), width)]
    target = sums if width == sums.shape[1] else sums.at[:, pl.ds(0, width)]
    plgpu.wgmma(target, operand, rows.transpose((1, 0)))


def _switch(chosen: Any, branches: list[Any]) -> Any:
    return branches[0]() if len(branches) == 1 else lax.switch(chosen, branches)


def _partial_sums(shape: Geometry[Tuning]) -> int:
    """Partial sums of a unit in a stage of e4m3 products: one for each 128 columns, or one if they do not fit.

    Where the width is branched on they would not: the assembler keeps copies of them.
    """
    fit = len(shape.tuning.widths) == 1 and shape.tuning.sums_fit(shape.mma, partial=shape.subtiles)
    return shape.subtiles if fit else 1


def _following_tiles(shape: Geometry, following: Ring, tiles: Any) -> Any:
    """Where the following stage's rows of x start, in tiles of 8."""
    return jnp.where(following.slot == 0, 0, tiles + shape.tuning.widest // 8)
