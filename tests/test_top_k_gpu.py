"""The kernel that picks the largest of each row, on a GPU. Run with `pytest -m gpu` where JAX sees one."""

import jax
import jax.numpy as jnp
import pytest
from numerics import assert_same_bits

from pallas_kernels import stable_top_k

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tokens", [1, 64, 1000])
@pytest.mark.parametrize("columns", [5, 112, 896, 4096])
def test_the_kernel_equals_the_stable_sort(columns: int, tokens: int) -> None:
    values = jnp.round(jax.random.normal(jax.random.key(columns), (tokens, columns)) * 8)  # many are equal
    values = values.at[0, ::3].set(jnp.nan).at[:, 1].set(-0.0)
    mine, other = (stable_top_k(values, min(16, columns), implementation=name) for name in ("triton", "xla"))
    assert_same_bits(mine, other)


@pytest.mark.parametrize("steps", [None, 512])
def test_a_million_tokens(steps: int | None) -> None:
    """The release's 16 of 896; scores of 512 steps only, so that most tokens have equal ones among their best."""
    for seed in range(8):
        scores = jax.random.uniform(jax.random.key(seed), (1 << 17, 896))
        scores = scores if steps is None else jnp.floor(scores * steps)
        mine, other = (stable_top_k(scores, 16, implementation=name) for name in ("triton", "xla"))
        assert bool(jnp.array_equal(mine, other))
