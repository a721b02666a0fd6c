"""Tokens spread out to rows in the order of their experts."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels import RowSchedule, combine_rows, gather_rows


@jax.custom_vjp
def spread(tokens_TL: Float[Array, "t l"], schedule: RowSchedule) -> Float[Array, "s l"]:
    """Each row its token: `[T, L] -> [S, L]`. The gradient adds a token's rows up slot by slot, in float32.

    JAX's own would scatter rows into tokens, in an order that a GPU does not fix.
    """
    return gather_rows(tokens_TL, schedule)


def _spread_forward(tokens_TL: Array, schedule: RowSchedule) -> tuple[Array, RowSchedule]:
    return spread(tokens_TL, schedule), schedule


def _spread_backward(schedule: RowSchedule, d_rows: Array) -> tuple[Array, RowSchedule]:
    ones = jnp.ones(schedule.row.shape, jnp.float32)
    d_tokens = combine_rows(d_rows, schedule.row, ones).astype(d_rows.dtype)
    return d_tokens, jax.tree.map(lambda leaf: np.zeros(leaf.shape, jax.dtypes.float0), schedule)


spread.defvjp(_spread_forward, _spread_backward)
