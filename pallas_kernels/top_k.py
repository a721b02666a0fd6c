"""The largest of each row, equal ones by their place: the picks of a router, the same on every device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import row_kernels, select


@functools.partial(jax.jit, static_argnames=("k", "implementation"))
def stable_top_k(values: Float[Array, "t n"], k: int, *, implementation: str | None = None) -> Int[Array, "t k"]:
    """Where the `k` largest of each row are, `[T, N] -> [T, K]`: from the largest on, equal values by index.

    Zeros of both signs are equal, and NaN comes after everything else. `jax.lax.top_k` is no substitute: backends
    differ in which of two equal values theirs returns first.

    Args:
        values: float32. k: `0 <= k <= N`. implementation: "reference" (a place is the number of values before it),
            "xla" (a stable sort), "mosaic" (Hopper and Blackwell: one kernel, of rows of 1,024 at most), "triton"
            (NVIDIA GPUs from Ampere on: one kernel), or None for the fastest that can.

    Raises:
        ValueError: `k` is out of its range, or no such implementation exists.
        NotImplementedError: the named implementation cannot run this here.
    """
    if not 0 <= k <= values.shape[1]:
        raise ValueError(f"{k=} must be at least 0, and at most the {values.shape[1]} values of a row")
    values = jax.lax.stop_gradient(values)
    chosen = select.choose("stable_top_k", implementation, x=values)
    if chosen in row_kernels.IMPLEMENTATIONS and values.size and k:
        kernel = row_kernels.orders("stable_top_k", chosen).top_k
        return jax.custom_batching.sequential_vmap(lambda values: kernel(values, k))(values)
    index = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
    if chosen != "reference":
        return jax.lax.sort((-values, index), dimension=1, is_stable=True, num_keys=1)[1][:, :k]
    return jax.vmap(functools.partial(_counted, k=k))(values)


def _counted(values: Any, k: int) -> Array:
    """The places of one row's `k` largest."""
    index = jnp.arange(values.size)
    key = jnp.where(jnp.isnan(values), -jnp.inf, values), ~jnp.isnan(values)

    def above(a: Any, b: Any) -> Any:
        return (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] > b[1]))

    def equal(a: Any, b: Any) -> Any:
        return (a[0] == b[0]) & (a[1] == b[1])

    mine, other = [part[:, None] for part in key], [part[None, :] for part in key]
    before = above(other, mine) | (equal(other, mine) & (index[None, :] < index[:, None]))
    place = jnp.sum(before, axis=1, dtype=jnp.int32)
    return jnp.argmax(place[None, :] == jnp.arange(k)[:, None], axis=1).astype(jnp.int32)
