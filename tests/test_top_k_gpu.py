"""The kernels that pick the largest of each row, on a GPU. Run with `pytest -m gpu` where JAX sees one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_same_bits

from pallas_kernels import stable_top_k

pytestmark = pytest.mark.gpu
LONGEST = {"mosaic": 1024, "triton": 4096}  # rows


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
