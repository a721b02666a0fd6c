"""The kernels that pick the largest of each row, on a GPU. Run with `pytest -m gpu` where JAX sees one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_same_bits

from pallas_kernels import stable_top_k, top_k_weights

pytestmark = pytest.mark.gpu
LONGEST = {"mosaic": 1024, "triton": 4096}  # rows
SUMMED = 2.0**-21  # that weights may be off: roundings of a sum in several steps, of a quotient and of a product


def weigh(implementation: str, k: int, **options: Any) -> Any:
    """`weigh(...)(scores, bias)`: ids and weights."""
    options = {"renormalize": True, "scale": 2.5} | options
    return lambda scores, bias: top_k_weights(scores, bias, k, **options, implementation=implementation)


@pytest.mark.parametrize("tokens", [1, 8, 64, 1001])
@pytest.mark.parametrize("columns", [1, 5, 33, 112, 896, 1024, 4096])
@pytest.mark.parametrize("kernel", LONGEST)
def test_the_kernel_equals_the_stable_sort(kernel: str, columns: int, tokens: int) -> None:
    if columns > LONGEST[kernel]:
        with pytest.raises(NotImplementedError, match=f"longer than the {LONGEST[kernel]}"):
            stable_top_k(jnp.zeros((tokens, columns)), 1, implementation=kernel)
        return
    values = jnp.round(jax.random.normal(jax.random.key(columns), (tokens, columns)) * 8)  # many are equal
    values = values.at[0, ::3].set(jnp.nan).at[:, 1:2].set(-0.0).at[-1, ::2].set(-jnp.inf)
    mine, other = (stable_top_k(values, min(16, columns), implementation=name) for name in (kernel, "xla"))
    assert_same_bits(mine, other)


@pytest.mark.parametrize("columns", [7, 112, 896])
@pytest.mark.parametrize("kernel", LONGEST)
def test_whole_rows_sorted(kernel: str, columns: int) -> None:
    """Any bits of float32 but subnormal numbers: NaNs of both signs come last, in their order."""
    bits = np.random.default_rng(columns).integers(0, 1 << 32, (64, columns), np.uint32)
    bits[1::2] &= 0xFFC0_0000  # of which many are equal
    bits &= np.where(bits & 0x7F80_0000, 0xFFFF_FFFF, 0x8000_0000).astype(np.uint32)  # subnormal ones become zeros
    order = np.argsort(-bits.view(np.float32), axis=1, kind="stable")
    values = jnp.asarray(bits.view(np.float32))
    for _ in range(20):
        np.testing.assert_array_equal(stable_top_k(values, columns, implementation=kernel), order)


@pytest.mark.parametrize("kernel", LONGEST)
def test_a_batch(kernel: str) -> None:
    values = jax.random.normal(jax.random.key(0), (3, 5, 9))
    mine, other = (jax.vmap(lambda v, n=name: stable_top_k(v, 4, implementation=n))(values) for name in (kernel, "xla"))
    assert_same_bits(mine, other)


@pytest.mark.parametrize("steps", [None, 512])
@pytest.mark.parametrize("kernel", LONGEST)
def test_a_million_tokens(kernel: str, steps: int | None) -> None:
    """The release's 16 of 896; scores of 512 steps only, so that most tokens have equal ones among their best."""
    for seed in range(8):
        scores = jax.random.uniform(jax.random.key(seed), (1 << 17, 896))
        scores = scores if steps is None else jnp.floor(scores * steps)
        mine, other = (stable_top_k(scores, 16, implementation=name) for name in (kernel, "xla"))
        assert bool(jnp.array_equal(mine, other))


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("columns", "k"), [(1, 1), (5, 5), (33, 16), (112, 16), (112, 112), (896, 16), (1024, 45)])
def test_weights_are_the_scores_picked(columns: int, k: int, renormalize: bool) -> None:
    """Against float64; scores whose sum is zero, and rows with NaN and infinity, which stay where they are."""
    for tokens in (1, 8, 1001):
        keys = jax.random.split(jax.random.key(tokens + columns))
        scores = jnp.round(jax.nn.sigmoid(8 * jax.random.normal(keys[0], (tokens, columns))) * 64) / 64
        scores = scores.at[1:2].set(0).at[2:3].set(jnp.nan).at[3:4, 0].set(jnp.inf)
        bias = jnp.round(jax.random.normal(keys[1], (columns,)) * 8) / 64  # of whose sums many are equal
        ids, weights = weigh("mosaic", k, renormalize=renormalize)(scores, bias)
        assert_same_bits(ids, stable_top_k(scores + bias[None, :], k, implementation="xla"))
        picked = np.take_along_axis(np.asarray(scores), np.asarray(ids), 1).astype(np.float64)
        with np.errstate(invalid="ignore"):
            picked = picked / (picked.sum(1, keepdims=True) + 1e-20) if renormalize else picked
        np.testing.assert_allclose(weights, 2.5 * picked, rtol=SUMMED)


def test_weights_in_a_batch_and_their_gradient() -> None:
    scores = jax.random.uniform(jax.random.key(0), (3, 5, 40))

    def total(implementation: str) -> Any:
        return lambda scores: jnp.sum(jnp.sin(jax.vmap(weigh(implementation, 4), (0, None))(scores, scores[0, 0])[1]))

    mine, other = (jax.jit(jax.grad(total(name)))(scores) for name in ("mosaic", "xla"))
    assert np.count_nonzero(other) == 3 * 5 * 4
    np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("steps", [None, 512])
@pytest.mark.parametrize("columns", [112, 896])
def test_weights_of_a_million_tokens(columns: int, steps: int | None) -> None:
    """Of sigmoid scores and a bias; in steps of 1/512 most tokens have equal sums among their best."""
    bias = jax.random.normal(jax.random.key(99), (columns,)) / 20
    bias = bias if steps is None else jnp.round(bias * steps) / steps
    for seed in range(8):
        scores = jax.nn.sigmoid(jax.random.normal(jax.random.key(seed), (1 << 17, columns)))
        scores = scores if steps is None else jnp.round(scores * steps) / steps
        mine, other = (weigh(name, 16)(scores, bias) for name in ("mosaic", "xla"))
        assert bool(jnp.array_equal(mine[0], other[0]))
        assert float(jnp.max(jnp.abs(mine[1] / other[1] - 1))) <= SUMMED
