"""`grouped_matmul` in plain `jax.numpy`: every group multiplies all rows, and keeps its own. The documentation."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.mxfp4 import MXFP4Array
from pallas_kernels.mxfp8 import MXFP8Array, TokenScaledArray
from pallas_kernels.rounding import to_bfloat16
from pallas_kernels.situ import Activation, apply_activation


def forward(
    x: Array | MXFP8Array | TokenScaledArray,
    w: Array | MXFP4Array,
    group_sizes: Array,
    activation: Activation | None,
    dtype: jnp.dtype,
) -> Array:
    """`[M, K], [G, N, K], [G] -> [M, N]`, or `[M, N/2]` with an activation, in `dtype`; other rows are zero."""
    rows, row_scale = split_rows(x)
    width = w.shape[1] // (2 if activation else 1)

    def one_group(g: Array, y: Array) -> Array:
        h = jnp.dot(rows, dense(w, g).T, preferred_element_type=jnp.float32) * row_scale
        if activation is not None:
            h = apply_activation(activation, to_bfloat16(h).astype(jnp.float32))
        return jnp.where(_members(rows, group_sizes, g), h.astype(dtype), y)

    return jax.lax.fori_loop(0, w.shape[0], one_group, jnp.zeros((x.shape[0], width), dtype))


def transposed(dy: Array, w: Array | MXFP4Array, group_sizes: Array) -> Array:
    """`dx[m] = dy[m] @ w[g]`: `[M, N], [G, N, K], [G] -> [M, K]` float32; other rows are zero."""

    def one_group(g: Array, dx: Array) -> Array:
        product = jnp.dot(dy, dense(w, g), preferred_element_type=jnp.float32)
        return jnp.where(_members(dy, group_sizes, g), product, dx)

    return jax.lax.fori_loop(0, w.shape[0], one_group, jnp.zeros((dy.shape[0], w.shape[2]), jnp.float32))


def split_rows(x: Array | MXFP8Array | TokenScaledArray) -> tuple[Array, Array | float]:
    """The rows as bfloat16, and what multiplies their float32 products: a scale `[M, 1]`, or 1.

    E4M3 values have four significant bits, so both quantised formats are exact in bfloat16 (for MXFP8: where a value
    is at least 2^-126 in magnitude).
    """
    if isinstance(x, MXFP8Array):
        return x.dequantize(jnp.bfloat16), 1.0
    if isinstance(x, TokenScaledArray):
        return x.values.astype(jnp.bfloat16), x.scales
    return x, 1.0


def dense(w: Array | MXFP4Array, g: Array) -> Array:
    """Group g's weights as bfloat16 `[N, K]`."""
    return w[g].dequantize(jnp.bfloat16) if isinstance(w, MXFP4Array) else w[g]


def _members(rows: Array, group_sizes: Array, g: Array) -> Array:
    stop = jnp.cumsum(group_sizes)[g]
    row = jnp.arange(rows.shape[0])[:, None]
    return (row >= stop - group_sizes[g]) & (row < stop)
