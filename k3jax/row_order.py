"""Tokens spread out to rows in the order of their experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Int

from pallas_kernels import RowSchedule, combine_rows, spread_rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def spread(
    tokens_TL: BFloat16[Array, "t l"], ids: Int[Array, "t x"], groups: int
) -> tuple[RowSchedule, BFloat16[Array, "s l"]]:
    """The order of the slots, and each row its token: `[T, L] -> [S, L]`. The gradient adds a token's rows up slot by
    slot, in float32.

    JAX's own would scatter rows into tokens, in an order that a GPU does not fix.
    """
    return spread_rows(tokens_TL, ids, groups)


def _spread_forward(tokens_TL: Array, ids: Array, groups: int) -> tuple[tuple[RowSchedule, Array], Array]:
    schedule, rows_SL = spread(tokens_TL, ids, groups)
    return (schedule, rows_SL), schedule.row


def _spread_backward(groups: int, positions: Array, d_results: tuple[RowSchedule, Array]) -> tuple[Array, np.ndarray]:
    del groups
    _, d_rows = d_results
    d_tokens = combine_rows(d_rows, positions, jnp.ones(positions.shape, jnp.float32)).astype(d_rows.dtype)
    return d_tokens, np.zeros(positions.shape, jax.dtypes.float0)


spread.defvjp(_spread_forward, _spread_backward)
