"""`grouped_matmul` with XLA's own operations and bounded memory: loops over groups, column tiles and row tiles.

    for each group that has rows:
        for each tile of output columns:
            decode that tile's weights once                    [columns, K] bfloat16: the only sizeable temporary
            for each tile of the group's rows:
                multiply, apply the activation, write the rows that belong to the group

A row tile at the end of `x` is moved back to fit, and may then cover rows of an earlier group, as it may cover rows of
a later one: hence the masked write.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.grouped_matmul.reference import split_rows
from pallas_kernels.grouped_matmul.tiling import Tiling, xla_tiling
from pallas_kernels.mxfp4 import MXFP4Array
from pallas_kernels.mxfp8 import MXFP8Array, TokenScaledArray
from pallas_kernels.rounding import to_bfloat16
from pallas_kernels.situ import Activation


def forward(
    x: Array | MXFP8Array | TokenScaledArray,
    w: Array | MXFP4Array,
    group_sizes: Array,
    activation: Activation | None,
    dtype: jnp.dtype,
) -> Array:
    """`[M, K], [G, N, K], [G] -> [M, N]`, or `[M, N/2]` with an activation, in `dtype`."""
    rows, row_scale = split_rows(x)
    groups, n, depth = w.shape
    width = n // (2 if activation else 1)
    tiling = _tiling(rows, groups, width, depth)

    def step(weights: tuple[Array, ...], start: Array, column: Array, inside: Array, y: Array) -> Array:
        x_tile = jax.lax.dynamic_slice_in_dim(rows, start, tiling.rows)
        scale = 1.0 if isinstance(row_scale, float) else jax.lax.dynamic_slice_in_dim(row_scale, start, tiling.rows)
        parts = [jnp.dot(x_tile, part.T, preferred_element_type=jnp.float32) * scale for part in weights]
        if activation is None:
            (tile,) = parts
        else:
            gate, up = (to_bfloat16(part).astype(jnp.float32) for part in parts)
            tile = activation(gate, up)
        old = jax.lax.dynamic_slice(y, (start, column), tile.shape)
        return jax.lax.dynamic_update_slice(y, jnp.where(inside, tile.astype(dtype), old), (start, column))

    offsets = (0,) if activation is None else (0, width)
    return _loop(w, group_sizes, tiling, offsets, width, step, jnp.zeros((rows.shape[0], width), dtype))


def transposed(dy: Array, w: Array | MXFP4Array, group_sizes: Array) -> Array:
    """`dx[m] = dy[m] @ w[g]`: `[M, N], [G, N, K], [G] -> [M, K]` float32; rows outside every group are zero."""
    groups, width, depth = w.shape
    tiling = _tiling(dy, groups, width, depth)

    def step(weights: tuple[Array, ...], start: Array, column: Array, inside: Array, dx: Array) -> Array:
        dy_tile = jax.lax.dynamic_slice(dy, (start, column), (tiling.rows, tiling.columns))
        # Selected before the product as well: rows outside may hold NaN, which a product would spread.
        product = jnp.dot(jnp.where(inside, dy_tile, 0), weights[0], preferred_element_type=jnp.float32)
        old = jax.lax.dynamic_slice_in_dim(dx, start, tiling.rows)
        return jax.lax.dynamic_update_slice_in_dim(dx, old + product, start, 0)

    return _loop(w, group_sizes, tiling, (0,), width, step, jnp.zeros((dy.shape[0], depth), jnp.float32))


def _tiling(rows: Array, groups: int, width: int, depth: int) -> Tiling:
    platform = jax.default_backend()
    return xla_tiling(rows=rows.shape[0], groups=groups, width=width, depth=depth, platform=platform)


def _loop(
    w: Array | MXFP4Array,
    group_sizes: Array,
    tiling: Tiling,
    offsets: tuple[int, ...],
    width: int,
    step: Callable[[tuple[Array, ...], Array, Array, Array, Array], Array],
    y: Array,
) -> Array:
    """Runs `step(weight tiles, row start, column, inside, y) -> y` over the three loops.

    `offsets` are the rows of `w[g]` where each operand begins: one for a plain product, gate and up for an activation.
    """
    stops = jnp.cumsum(group_sizes)

    def one_group(g: Array, y: Array) -> Array:
        stop, first = stops[g], stops[g] - group_sizes[g]
        num_row_tiles = -(-group_sizes[g] // tiling.rows)

        def one_column_tile(c: Array, y: Array) -> Array:
            column = c * tiling.columns
            weights = tuple(_decode(w, g, offset + column, tiling.columns) for offset in offsets)

            def one_row_tile(r: Array, y: Array) -> Array:
                wanted = first + r * tiling.rows
                start = jnp.minimum(wanted, y.shape[0] - tiling.rows)
                row = start + jnp.arange(tiling.rows)[:, None]
                return step(weights, start, column, (row >= wanted) & (row < stop), y)

            return jax.lax.fori_loop(0, num_row_tiles, one_row_tile, y)

        num_column_tiles = jnp.where(group_sizes[g] > 0, width // tiling.columns, 0)
        return jax.lax.fori_loop(0, num_column_tiles, one_column_tile, y)

    return jax.lax.fori_loop(0, w.shape[0], one_group, y)


def _decode(w: Array | MXFP4Array, g: Array, row: Array, num_rows: int) -> Array:
    """Rows `[row, row + num_rows)` of group g, as bfloat16 `[num_rows, K]`."""

    def tile(leaf: Array) -> Array:
        return jax.lax.dynamic_slice(leaf, (g, row, 0), (1, num_rows, leaf.shape[2]))[0]

    if isinstance(w, MXFP4Array):
        return MXFP4Array(tile(w.codes), tile(w.scales)).dequantize(jnp.bfloat16)
    return tile(w)
