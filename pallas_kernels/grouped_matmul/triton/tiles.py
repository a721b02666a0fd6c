"""Which rows and columns a block of the Triton kernels works on, found on the device by every block for itself.

A group of `size` rows has `cdiv(size, WIDTH)` row tiles. Tiles are numbered group by group, within a group column block
by column block, and within one row tile by row tile, so that neighbours in time share weights, then rows. An empty
group has no tile, and a block beyond the last tile has nothing to do.
"""

import triton.language as tl

from pallas_kernels.triton_call import jit


@jit
def locate(
    sizes_ptr: tl.tensor,
    tile: tl.tensor,
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> tl.tensor:
    """(group, column block, first row, rows) of a tile; the group is GROUPS beyond the last. PADDED: a power of two."""
    number = tl.arange(0, PADDED)
    sizes = tl.load(sizes_ptr + number, mask=number < GROUPS, other=0)
    tiles = tl.cdiv(sizes, WIDTH) * BLOCKS
    # Every padding entry ends at the last tile too, so beyond that the count is PADDED.
    group = tl.minimum(tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0), GROUPS)
    size = tl.sum(tl.where(number == group, sizes, 0), 0)
    first_row = tl.sum(tl.where(number < group, sizes, 0), 0)
    local = tile - tl.sum(tl.where(number < group, tiles, 0), 0)
    row_tiles = tl.maximum(tl.cdiv(size, WIDTH), 1)
    column = local // row_tiles
    done = (local - column * row_tiles) * WIDTH
    return group, column, first_row + done, tl.minimum(size - done, WIDTH)
