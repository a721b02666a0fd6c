"""The largest of each row, against NumPy's stable sort: equal values, zeros of both signs, infinities, NaN; weights."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotations import unchecked_annotations
from numpy.typing import NDArray

from pallas_kernels import row_kernels, select, stable_top_k, top_k_weights


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


def truth(
    scores: NDArray[Any], bias: NDArray[Any], k: int, renormalize: bool, scale: float
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Picks by NumPy's sort of float32 sums, and weights in float64."""
    ids = np.argsort(-(scores + bias), axis=1, kind="stable")[:, :k]
    weights = np.take_along_axis(scores, ids, 1).astype(np.float64)
    return ids, scale * (weights / (weights.sum(1, keepdims=True) + 1e-20) if renormalize else weights)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_weights_are_the_scores_picked(implementation: str, renormalize: bool) -> None:
    """Of sums of which many are equal, or -inf; scores whose sum is zero; and a NaN stays in its row."""
    rng = np.random.default_rng(0)
    scores, bias = (rng.integers(0, 9, shape).astype(np.float32) / 8 for shape in ((50, 40), 40))
    scores[:10], bias[::3] = rng.random((10, 40)), -np.inf
    scores[1], scores[2, 5], scores[3] = 0, np.nan, np.nan
    options: dict[str, Any] = {"k": 16, "renormalize": renormalize, "scale": 2.5}
    ids, weights = top_k_weights(jnp.asarray(scores), jnp.asarray(bias), **options, implementation=implementation)
    expected_ids, expected = truth(scores, bias, **options)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=1e-6 if renormalize else 1e-7)


@pytest.fixture
def kernel_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mosaic's kernel is NumPy's formula, of which JAX knows no derivative and no batch."""

    def kernel(scores: jax.Array, bias: jax.Array, *options: Any) -> Any:
        def call(scores: Any, bias: Any) -> Any:
            ids, weights = truth(np.asarray(scores), np.asarray(bias), *options)
            return ids.astype(np.int32), weights.astype(np.float32)

        shape = scores.shape[0], options[0]
        results = jax.ShapeDtypeStruct(shape, np.int32), jax.ShapeDtypeStruct(shape, np.float32)
        return jax.pure_callback(call, results, scores, bias)

    kernels = SimpleNamespace(top_k_weights=kernel, why_not=lambda *_: None)
    monkeypatch.setattr(select, "why_not_on_gpu", lambda *_: None)
    monkeypatch.setattr(row_kernels, "orders", lambda *_: kernels)


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
@pytest.mark.usefixtures("kernel_without_gradient")
def test_weights_have_the_gradient_of_a_quotient(implementation: str) -> None:
    """For scores s of sum S, scale / S * (d s_i - s_i / S * sum of d); none for what was not picked, nor the bias."""
    rng = np.random.default_rng(1)
    scores, bias = rng.random((2, 3, 11), np.float32), rng.standard_normal(11).astype(np.float32)
    d_weights, tangent = (rng.standard_normal((2, 3, n)).astype(np.float32) for n in (4, 11))
    how: dict[str, Any] = {"renormalize": True, "scale": 2.5}

    def weights(scores: jax.Array, bias: jax.Array) -> jax.Array:
        return jax.vmap(lambda s: top_k_weights(s, bias, 4, **how, implementation=implementation)[1])(scores)

    expected = np.zeros(scores.shape)
    value, transposed = jax.vjp(weights, jnp.asarray(scores), jnp.asarray(bias))
    for at in range(2):
        ids, weight = truth(scores[at], bias, 4, **how)
        np.testing.assert_allclose(value[at], weight, rtol=1e-6)
        total = np.take_along_axis(scores[at], ids, 1).astype(np.float64).sum(1, keepdims=True)
        d_scores = (2.5 * d_weights[at] - (d_weights[at] * weight).sum(1, keepdims=True)) / total
        np.put_along_axis(expected[at], ids, d_scores, 1)
    d_scores, d_bias = transposed(jnp.asarray(d_weights))
    np.testing.assert_allclose(d_scores, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(d_bias, np.zeros(11))
    moved = jax.jvp(lambda scores: weights(scores, jnp.asarray(bias)), (jnp.asarray(scores),), (jnp.asarray(tangent),))[
        1
    ]
    np.testing.assert_allclose(np.vdot(moved, d_weights), np.vdot(tangent, expected), rtol=1e-4)


def test_a_bias_of_another_width_and_too_many_picks() -> None:
    scores = jnp.zeros((2, 5))
    how: dict[str, Any] = {"renormalize": True, "scale": 1.0}
    with (
        unchecked_annotations(),
        pytest.raises(ValueError, match=r"bias is float32 \(4,\), and must be float32 \(5,\)"),
    ):
        top_k_weights(scores, jnp.zeros(4), 1, **how)
    with pytest.raises(ValueError, match=r"k=6 must be at least 0, and at most the 5 values"):
        top_k_weights(scores, scores[0], 6, **how)
    assert top_k_weights(scores[:0], scores[0], 2, **how)[1].shape == (0, 2)
