"""A product by low-rank matrices, one pair a group, that has gradients for rows and matrices alike.

    y[m] = (x[m] @ a[g].T) @ b[g].T        a: [G, R, K], b: [G, N, R], g the group of row m

It is what trains beside frozen weights. Small next to their product, it runs on `xla` everywhere.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float, Int

from pallas_kernels.grouped_matmul import api

_ROW_TILE = 256


def low_rank_matmul(
    x: BFloat16[Array, "m k"], a: BFloat16[Array, "g r k"], b: BFloat16[Array, "g n r"], group_sizes: Int[Array, " g"]
) -> Float[Array, "m n"]:
    """`[M, K] -> [M, N]` float32, the rows between rounded to bfloat16; rows past every group are unspecified.

    Differentiable with respect to `x`, `a` and `b`; rows of `x` past every group may hold anything and get zeros.
    """
    return _product(_product(x, a, group_sizes, "bf16"), b, group_sizes, "f32")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(x: Array, w: Array, group_sizes: Array, out_format: str) -> Array:
    """`grouped_matmul` of bfloat16 `w [G, N, K]`, with a gradient for `w` too."""
    y = api.grouped_matmul(x, w, group_sizes, out_format=out_format, implementation="xla")
    assert isinstance(y, jax.Array)
    return y


def _product_forward(x: Array, w: Array, group_sizes: Array, out_format: str) -> tuple[Array, tuple[Array, ...]]:
    return _product(x, w, group_sizes, out_format), (x, w, group_sizes)


def _product_backward(out_format: str, residuals: tuple[Array, ...], dy: Array) -> tuple[Array, Array, Any]:
    x, w, group_sizes = residuals
    call = functools.partial(api.grouped_matmul, out_format=out_format, implementation="xla")
    _, pullback = jax.vjp(lambda x: call(x, w, group_sizes), x)
    (dx,) = pullback(dy)
    dw = grouped_outer(dy.astype(jnp.bfloat16), x, group_sizes)
    return dx, dw.astype(w.dtype), np.zeros(group_sizes.shape, jax.dtypes.float0)


_product.defvjp(_product_forward, _product_backward)


def grouped_outer(
    dy: BFloat16[Array, "m n"], x: BFloat16[Array, "m k"], group_sizes: Int[Array, " g"]
) -> Float[Array, "g n k"]:
    """`dw[g] = dy[rows of g].T @ x[rows of g]`, float32 `[G, N, K]`, tile by tile of rows in a fixed order."""
    rows = min(_ROW_TILE, x.shape[0])
    stops = jnp.cumsum(group_sizes)

    def one_group(g: Array) -> Array:
        stop, first = stops[g], stops[g] - group_sizes[g]

        def one_tile(r: Array, total: Array) -> Array:
            wanted = first + r * rows
            start = jnp.minimum(wanted, x.shape[0] - rows)
            row = start + jnp.arange(rows)[:, None]
            inside = (row >= wanted) & (row < stop)
            # Both are selected: rows outside may hold NaN, which a product with zero would spread.
            dy_tile, x_tile = (
                jnp.where(inside, jax.lax.dynamic_slice_in_dim(part, start, rows), 0) for part in (dy, x)
            )
            return total + jnp.dot(dy_tile.T, x_tile, preferred_element_type=jnp.float32)

        zeros = jnp.zeros((dy.shape[1], x.shape[1]), jnp.float32)
        return jax.lax.fori_loop(0, -(-group_sizes[g] // rows), one_tile, zeros)

    return jax.lax.map(one_group, jnp.arange(group_sizes.shape[0]))
