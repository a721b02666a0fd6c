"""How a block of a persistent grid goes through its tiles."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul.mosaic_parts.geometry import Geometry, Tile


def for_each_tile(shape: Geometry, steps: Any, blocks: int, run: Callable[[Tile], None]) -> Any:
    """Runs every `blocks`-th tile, from the block's own number on; returns how many there were.

    `steps.locate(tile, group)` gives (group, its first tile, first row and size), searching from `group` on, and group
    G where there is no such tile.
    """

    def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        number, count, group, first_tile, first_row, size = carry
        column, row, rows = shape.place(number - first_tile, size)
        run(Tile(count, group, column, first_row + row, rows))
        return number + blocks, count + 1, *steps.locate(number + blocks, group)

    zero = jnp.int32(0)
    own = lax.axis_index("block")
    return lax.while_loop(lambda carry: carry[2] < shape.groups, step, (own, zero, *steps.locate(own, zero)))[1]
