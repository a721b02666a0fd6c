"""The kernels that gather rows and add them up, on a GPU. Run with `pytest -m gpu` where JAX sees one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_same_bits

from pallas_kernels import combine_rows, gather_rows, schedule_rows

pytestmark = pytest.mark.gpu
KERNELS = ("mosaic", "triton")


@pytest.mark.parametrize(("tokens", "slots", "columns"), [(1, 16, 3584), (7, 3, 40), (1024, 16, 3584), (5, 40, 72)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_sums_equal_the_loops_and_read_nothing_else(kernel: str, tokens: int, slots: int, columns: int) -> None:
    rng = np.random.default_rng(tokens)
    positions = rng.permutation(tokens * slots + 9)[: tokens * slots].reshape(tokens, slots).astype(np.int32)
    positions.reshape(-1)[1::5] = -1
    rows = np.full((tokens * slots + 9, columns), np.nan, np.float32)
    rows[positions[positions >= 0]] = rng.standard_normal((int((positions >= 0).sum()), columns))
    weights = np.where(positions < 0, np.nan, rng.standard_normal(positions.shape)).astype(np.float32)
    given = jnp.asarray(rows).astype(jnp.bfloat16), jnp.asarray(positions), jnp.asarray(weights)
    sums = np.zeros((tokens, columns))
    for t, k in zip(*np.nonzero(positions >= 0), strict=True):
        sums[t] += np.asarray(given[0][positions[t, k]], np.float64) * weights[t, k]
    first = combine_rows(*given, implementation=kernel)
    np.testing.assert_allclose(first, sums, rtol=1e-5, atol=1e-5)
    for _ in range(20):
        assert_same_bits(combine_rows(*given, implementation=kernel), first)


@pytest.mark.parametrize(
    ("tokens", "rows", "columns"), [(1, 16, 3584), (7, 9, 40), (1024, 16384, 3584), (8192, 131072, 3584)]
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_are_their_tokens(kernel: str, tokens: int, rows: int, columns: int) -> None:
    bits = jax.random.bits(jax.random.key(0), (tokens, columns), jnp.uint16)  # NaNs and subnormals too
    numbers = jax.random.randint(jax.random.key(1), (rows,), 0, tokens)
    x = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    gathered = jax.lax.bitcast_convert_type(gather_rows(x, numbers, implementation=kernel), jnp.uint16)
    assert bool(jnp.array_equal(gathered, bits[numbers]))


@pytest.mark.parametrize(("tokens", "groups"), [(1, 896), (8, 112), (64, 112), (1024, 112), (1024, 896)])
def test_slots_sorted_in_one_kernel(tokens: int, groups: int) -> None:
    ids = jax.random.randint(jax.random.key(tokens), (tokens, 16), -1, groups)
    mine, other = (schedule_rows(ids, groups, implementation=name) for name in ("triton", "xla"))
    jax.tree.map(assert_same_bits, mine, other)
