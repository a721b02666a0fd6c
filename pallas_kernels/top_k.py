"""The largest of each row, equal ones by their place: the picks of a router, the same on every device, and weights."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import row_kernels, select

VANISHED = 1e-20  # added to a sum of scores that are none of them negative, so that zeros are not divided by zero


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
    _require_picks(values, k)
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


@functools.partial(jax.jit, static_argnames=("k", "renormalize", "scale", "implementation"))
def top_k_weights(
    scores: Float[Array, "t n"],
    bias: Float[Array, " n"],
    k: int,
    *,
    renormalize: bool,
    scale: float,
    implementation: str | None = None,
) -> tuple[Int[Array, "t k"], Float[Array, "t k"]]:
    """A router's picks and their weights: the biased scores choose, the unbiased ones weigh.

        ids     = stable_top_k(scores + bias, k)
        weights = scores[ids]
        weights = weights / (sum(weights) + 1e-20)      # if renormalize
        weights = weights * scale

    Args:
        scores: float32 `[T, N]`. bias: float32 `[N]`. k: `0 <= k <= N`. implementation: "reference" and "xla" (the
            formula, on that `stable_top_k`), "mosaic" (Hopper and Blackwell: one kernel, of rows of 1,024 at most), or
            None for the fastest that can.

    Returns:
        int32 and float32 `[T, K]`. Implementations have the same ids; weights differ by the order of the sum. The
        weights are differentiable with respect to `scores`; `bias` has no gradient.

    Raises:
        ValueError: `bias` is not of the scores' dtype and width, `k` is out of its range, or no such implementation
            exists.
        NotImplementedError: the named implementation cannot run this here.
    """
    if bias.shape != scores.shape[1:] or bias.dtype != scores.dtype:
        raise ValueError(f"bias is {bias.dtype} {bias.shape}, and must be {scores.dtype} {scores.shape[1:]}")
    _require_picks(scores, k)
    chosen = select.choose("top_k_weights", implementation, x=scores)
    if chosen in row_kernels.IMPLEMENTATIONS and scores.size and k:
        return _in_one_kernel(chosen, k, renormalize, scale, scores, bias)
    ids = stable_top_k(scores + bias[None, :], k, implementation=chosen)
    return ids, _weights(scores, ids, renormalize, scale)


def _weights(scores: Array, ids: Array, renormalize: bool, scale: float) -> Array:
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if renormalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + VANISHED)
    return weights * scale


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
def _in_one_kernel(
    implementation: str, k: int, renormalize: bool, scale: float, scores: Array, bias: Array
) -> tuple[Array, Array]:
    kernel = row_kernels.orders("top_k_weights", implementation).top_k_weights
    one = jax.custom_batching.sequential_vmap(lambda scores, bias: kernel(scores, bias, k, renormalize, scale))
    return one(scores, bias)


@_in_one_kernel.defjvp
def _in_one_kernel_jvp(
    implementation: str, k: int, renormalize: bool, scale: float, primals: Any, tangents: Any
) -> tuple[tuple[Array, Array], tuple[Any, Array]]:
    """The formula's at the kernel's picks."""
    ids, weights = _in_one_kernel(implementation, k, renormalize, scale, *primals)
    formula = functools.partial(_weights, ids=ids, renormalize=renormalize, scale=scale)
    d_weights = jax.jvp(formula, primals[:1], tangents[:1])[1]
    return (ids, weights), (np.zeros(ids.shape, jax.dtypes.float0), d_weights)


def _require_picks(values: Array, k: int) -> None:
    if not 0 <= k <= values.shape[1]:
        raise ValueError(f"{k=} must be at least 0, and at most the {values.shape[1]} values of a row")
