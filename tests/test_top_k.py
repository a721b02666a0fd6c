"""The largest of each row, against NumPy's stable sort: equal values, zeros of both signs, infinities and NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import stable_top_k


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(("columns", "k"), [(1, 1), (7, 7), (40, 16), (5, 0)])
def test_the_largest_in_order(columns: int, k: int, implementation: str) -> None:
    values = np.random.default_rng(columns).integers(-3, 3, (50, columns)).astype(np.float32)
    values[0] = [(np.nan, -0.0, np.inf, 0.0, -np.inf)[i % 5] for i in range(columns)]
    expected = np.argsort(-values, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(stable_top_k(jnp.asarray(values), k, implementation=implementation), expected)


def test_nothing_a_batch_and_no_gradient() -> None:
    assert stable_top_k(jnp.zeros((0, 4)), 2).shape == (0, 2)
    values = jax.random.normal(jax.random.key(0), (3, 5, 9))
    batch = jax.vmap(lambda values: stable_top_k(values, 4))(values)
    np.testing.assert_array_equal(batch[2], stable_top_k(values[2], 4))
    gradient = jax.grad(lambda v: jnp.take_along_axis(v, stable_top_k(v, 2), axis=1).sum())(values[0])
    assert gradient.sum() == 10


def test_more_than_there_are() -> None:
    with pytest.raises(ValueError, match=r"k=5 must be at least 0, and at most the 4 values"):
        stable_top_k(jnp.zeros((2, 4)), 5)
