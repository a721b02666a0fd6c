"""Which rows and columns a block of a persistent kernel works on, as pure functions of integers.

A group of `size` rows is cut into the fewest row tiles that `widest` allows, all of one height, a multiple of 8; the
last has what is left. Tiles are numbered group by group, within a group column block by column block, and within a
column block row tile by row tile, so that neighbours in time share weights, then rows. An empty group has no tile.
Where a call is several launches with tiles of different widths, each group is one launch's, and empty in the others.

    for tile in range(walker, total, walkers):        # what each block of the persistent grid does

Every function takes and returns Python integers or traced int32 scalars.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

ROW_STEP = 8  # the granule in the direction of the rows


def quotient[Count: (int, jax.Array)](a: Count, b: Count | int) -> Count:
    """`a // b` for non-negative `a`."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    return lax.div(jnp.int32(a), jnp.int32(b))


def row_tiles[Count: (int, jax.Array)](size: Count, widest: int) -> Count:
    """The number of row tiles of a group."""
    return quotient(size + (widest - 1), widest)


def tile_height[Count: (int, jax.Array)](size: Count, tiles: Count) -> Count:
    """Rows of each of a group's `tiles > 0` row tiles but the last: equal shares, rounded up to a multiple of 8."""
    return quotient(quotient(size + (tiles - 1), tiles) + (ROW_STEP - 1), ROW_STEP) * ROW_STEP


def place[Count: (int, jax.Array)](local: Count, size: Count, widest: int) -> tuple[Count, Count, Count]:
    """(column block, first row, rows) of tile `local` of a non-empty group, both counted from the group's first."""
    tiles = row_tiles(size, widest)
    column = quotient(local, tiles)
    height = tile_height(size, tiles)
    first = (local - column * tiles) * height
    left = size - first
    rows = min(left, height) if isinstance(left, int) else jnp.minimum(left, height)
    return column, first, rows


def place_in_bands[Count: (int, jax.Array)](
    local: Count, size: Count, widest: int, columns: int, band: int
) -> tuple[Count, Count, Count]:
    """`place`, in bands of at most `band` row tiles: a band goes through all `columns` column blocks before the next.

    What many blocks read at the same time is then a few row tiles and a few column blocks, of which caches hold more.
    """
    tiles = row_tiles(size, widest)
    above = quotient(local, band * columns) * band
    inside = local - above * columns
    left = tiles - above
    rows = min(left, band) if isinstance(left, int) else jnp.minimum(left, band)
    column = quotient(inside, rows)
    tile = above + inside - column * rows
    _, first, height = place(tile, size, widest)
    return column, first, height


def narrowest[Count: (int, jax.Array)](rows: Count, widths: tuple[int, ...]) -> Count:
    """The index of the narrowest of the ascending `widths` that holds `rows`; the last must."""
    if isinstance(rows, int):
        return sum(rows > width for width in widths[:-1])
    return sum(((rows > width).astype(jnp.int32) for width in widths[:-1]), jnp.int32(0))


class Prices(NamedTuple):
    """What a tile over all columns costs in a launch, at each of its ascending widths."""

    widths: tuple[int, ...]
    costs: tuple[int, ...]


def group_cost[Count: (int, jax.Array)](size: Count, prices: Prices) -> Count:
    """Of a group's tiles, the last taken to be as high as the others."""
    widths, costs = prices
    tiles = row_tiles(size, widths[-1])
    if isinstance(size, int):
        return tiles and tiles * costs[narrowest(tile_height(size, tiles), widths)]
    height = tile_height(size, jnp.maximum(tiles, 1))
    cost = jnp.int32(costs[-1])
    for width, narrower in zip(widths[-2::-1], costs[-2::-1], strict=True):
        cost = jnp.where(height <= width, narrower, cost)
    return tiles * cost


def cheapest[Count: (int, jax.Array)](size: Count, launches: tuple[Prices, ...]) -> Count:
    """Which of the launches computes a group: the first of the cheapest."""
    costs = [group_cost(size, prices) for prices in launches]
    if isinstance(size, int):
        return costs.index(min(costs))
    best, index = costs[0], jnp.int32(0)
    for number, cost in enumerate(costs[1:], 1):
        index = jnp.where(cost < best, number, index)
        best = jnp.minimum(cost, best)
    return index
