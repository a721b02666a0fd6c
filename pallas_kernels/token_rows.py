"""Tokens spread out to rows, and rows added up to tokens: what goes before and after a grouped product."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import row_kernels, select
from pallas_kernels.mxfp8 import MXFP8Array, TokenScaledArray
from pallas_kernels.slot_order import RowSchedule

Tokens = Array | MXFP8Array | TokenScaledArray
"""`[T, L]` of any float dtype, or quantised: a row's scales move with it."""


@functools.partial(jax.jit, static_argnames=("implementation",))
def gather_rows(x: Tokens, schedule: RowSchedule, *, implementation: str | None = None) -> Any:
    """Each row its token, `[T, L] -> [S, L]`: `y[s] = x[schedule.token[s]]`.

    Rows of no group, the last ones, may hold anything: a kernel reads each token once and writes it to its rows.

    Args:
        x: bfloat16 `[T, L]` or of another float dtype, an MXFP8Array or a TokenScaledArray. schedule: of its slots.
        implementation: "reference" or "xla" (the same indexing), "mosaic" (Hopper and Blackwell, bfloat16 or
            quantised), "triton" (NVIDIA GPUs from Ampere on), or None for the fastest that can.

    Raises:
        ValueError: no such implementation exists.
        NotImplementedError: the named implementation cannot run this here, or a gradient is asked of a kernel (who
            knows where each token's rows are adds them up with `combine_rows`, in a fixed order).
    """
    chosen = select.choose("gather_rows", implementation, x=x)
    leaves = jax.tree.leaves(x)
    rows = schedule.token.shape[0]
    if chosen in row_kernels.IMPLEMENTATIONS and rows and all(leaf.size for leaf in leaves):
        kernel = row_kernels.moves(chosen).gather_rows
        return _one_by_one(lambda x, positions: kernel(x, positions, rows))(x, schedule.row)
    return jax.tree.map(lambda leaf: leaf.at[schedule.token].get(mode="promise_in_bounds"), x)


@functools.partial(jax.jit, static_argnames=("implementation",))
def combine_rows(
    rows: Float[Array, "s l"],
    positions: Int[Array, "t x"],
    weights: Float[Array, "t x"],
    *,
    implementation: str | None = None,
) -> Float[Array, "t l"]:
    """The weighted sum of each token's rows, float32.

        for k in range(X):                                       # in this order, in float32
            y[t] += rows[positions[t, k]] * weights[t, k]        # unless positions[t, k] < 0

    Args:
        rows: `[S, L]`, bfloat16 or float32. Those that no position names are not read and may hold anything, NaN too.
        positions: int32 `[T, X]`, `positions < S`; a negative one adds nothing. No row is named twice.
        weights: float32 `[T, X]`.
        implementation: "reference", "xla", "mosaic" (Hopper and Blackwell, bfloat16 rows), "triton" (NVIDIA GPUs from
            Ampere on), or None for the fastest that can.

    Returns:
        float32 `[T, L]`. Differentiable with respect to `rows` and `weights`, once: rows that no position names have a
        gradient of zero.

    Raises:
        ValueError: no such implementation exists.
        NotImplementedError: the named implementation cannot run this here.
    """
    return _combine(rows, positions, weights, select.choose("combine_rows", implementation, x=rows))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _combine(rows: Array, positions: Array, weights: Array, implementation: str) -> Array:
    if implementation in row_kernels.IMPLEMENTATIONS and rows.size and positions.size:
        return _one_by_one(row_kernels.moves(implementation).combine_rows)(rows, positions, weights)
    return (_reference if implementation == "reference" else _slot_by_slot)(rows, positions, weights)


def _reference(rows: Array, positions: Array, weights: Array) -> Array:
    named = positions[:, :, None] >= 0
    picked = jnp.where(named, rows[jnp.maximum(positions, 0)].astype(jnp.float32), 0)
    return jnp.sum(picked * jnp.where(named, weights[:, :, None], 0), axis=1)


def _slot_by_slot(rows: Array, positions: Array, weights: Array) -> Array:
    """Without a loop that XLA would have to run: it makes one kernel of all slots."""
    total = jnp.zeros((positions.shape[0], rows.shape[1]), jnp.float32)
    for k in range(positions.shape[1]):
        at = positions[:, k]
        row = rows.at[jnp.maximum(at, 0)].get(mode="promise_in_bounds").astype(jnp.float32)
        total += jnp.where(at[:, None] >= 0, row * weights[:, k, None], 0.0)
    # XLA for GPUs takes minutes to see how so many gathers might join what follows, and leaves them apart in the end.
    return jax.lax.optimization_barrier(total)


def _forward(rows: Array, positions: Array, weights: Array, implementation: str) -> tuple[Array, tuple[Any, ...]]:
    return _combine(rows, positions, weights, implementation), (rows, positions, weights)


def _backward(implementation: str, residuals: tuple[Any, ...], d_sums: Array) -> tuple[Array, Any, Array]:
    """A row gets its token's gradient times its weight, a weight the product of its row with that gradient.

    JAX's own would scatter each slot once more into an array of all rows.
    """
    del implementation
    rows, positions, weights = residuals
    num_rows = rows.shape[0]
    # Dropped positions too are told apart, as `unique_indices` wants them.
    nowhere = num_rows + jnp.arange(positions.size, dtype=jnp.int32).reshape(positions.shape)
    at = jnp.where(positions >= 0, positions, nowhere)
    own = jnp.broadcast_to(jnp.arange(positions.shape[0], dtype=jnp.int32)[:, None], positions.shape)
    token = jnp.zeros(num_rows, jnp.int32).at[at].set(own, mode="drop", unique_indices=True)
    weight = jnp.zeros(num_rows, weights.dtype).at[at].set(weights, mode="drop", unique_indices=True)
    d_rows = (weight[:, None] * d_sums[token]).astype(rows.dtype)

    def one_slot(at: Array) -> Array:
        dot = jnp.sum(rows[jnp.maximum(at, 0)].astype(jnp.float32) * d_sums, axis=-1)
        return jnp.where(at >= 0, dot, 0)

    d_weights = jax.lax.map(one_slot, positions.T).T
    return d_rows, np.zeros(positions.shape, jax.dtypes.float0), d_weights


_combine.defvjp(_forward, _backward)


def _one_by_one(kernel: Any) -> Any:
    """`kernel`, which `vmap` runs once for each element of the batch."""
    return jax.custom_batching.sequential_vmap(kernel)
