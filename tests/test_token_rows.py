"""Rows gathered and rows added up, against loops in float64; what nobody names is never read."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_same_bits

from pallas_kernels import (
    after,
    combine_rows,
    explain,
    gather_rows,
    quantize_fp8_token,
    quantize_mxfp8,
    schedule_rows,
    select,
    spread_rows,
)

PLAIN = ("reference", "xla")
FORMATS: dict[str, Any] = {"bf16": lambda x: x, "mxfp8": quantize_mxfp8, "fp8_token": quantize_fp8_token}
rng = np.random.default_rng(0)


def operands(tokens: int = 7, slots: int = 3, columns: int = 40) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows in a random order, every fourth slot masked; rows that nobody names and masked weights are NaN."""
    positions = rng.permutation(tokens * slots + 5)[: tokens * slots].reshape(tokens, slots).astype(np.int32)
    positions.reshape(-1)[::4] = -1
    rows = np.full((tokens * slots + 5, columns), np.nan, np.float32)
    named = positions[positions >= 0]
    rows[named] = rng.standard_normal((named.size, columns))
    weights = np.where(positions < 0, np.nan, rng.standard_normal(positions.shape)).astype(np.float32)
    return rows, positions, weights


def loop(rows: np.ndarray, positions: np.ndarray, weights: np.ndarray) -> np.ndarray:
    sums = np.zeros((len(positions), rows.shape[1]))
    for t, k in zip(*np.nonzero(positions >= 0), strict=True):
        sums[t] += rows[positions[t, k]].astype(np.float64) * weights[t, k]
    return sums


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=str)
@pytest.mark.parametrize("implementation", PLAIN)
def test_sums_are_those_of_the_loop(implementation: str, dtype: type) -> None:
    rows, positions, weights = operands()
    given = jnp.asarray(rows).astype(dtype)
    y = combine_rows(given, jnp.asarray(positions), jnp.asarray(weights), implementation=implementation)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, loop(np.asarray(given), positions, weights), rtol=1e-5, atol=1e-6)


def test_slots_are_added_in_their_order() -> None:
    rows = jnp.asarray([[1e8], [1.0], [-1e8]])
    weights = jnp.ones((2, 3))
    positions = jnp.asarray([[0, 1, 2], [0, 2, 1]], jnp.int32)
    np.testing.assert_array_equal(combine_rows(rows, positions, weights), [[0.0], [1.0]])


@pytest.mark.parametrize("implementation", PLAIN)
def test_gradients_are_those_of_the_sum(implementation: str) -> None:
    """A row's is its weight times its token's, a weight's the row's product with it: central differences agree."""
    rows, positions, weights = operands(4, 2, 5)
    d_sums = rng.standard_normal((4, 5)).astype(np.float32)

    def scalar(rows: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.sum(combine_rows(rows, jnp.asarray(positions), weights, implementation=implementation) * d_sums)

    d_rows, d_weights = (np.asarray(d) for d in jax.grad(scalar, argnums=(0, 1))(jnp.asarray(rows), weights))
    assert not d_weights[positions < 0].any()
    unnamed = np.setdiff1d(np.arange(len(rows)), positions)
    assert unnamed.size
    assert not d_rows[unnamed].any()
    for t, k in zip(*np.nonzero(positions >= 0), strict=True):
        row = positions[t, k]
        np.testing.assert_allclose(d_rows[row], weights[t, k] * d_sums[t], rtol=1e-6)
        np.testing.assert_allclose(d_weights[t, k], np.dot(rows[row], d_sums[t]), rtol=1e-5, atol=1e-6)


def test_a_batch_and_nothing_at_all() -> None:
    rows, positions, weights = (jnp.asarray(array) for array in operands())
    batch = jax.vmap(combine_rows)(*(jnp.stack([array, array[::-1]]) for array in (rows, positions, weights)))
    assert_same_bits(batch[0], combine_rows(rows, positions, weights))
    assert combine_rows(rows[:0], positions[:0], weights[:0]).shape == (0, 40)
    assert not combine_rows(rows, jnp.full((2, 3), -1), jnp.ones((2, 3))).any()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("implementation", PLAIN)
def test_rows_are_their_tokens_with_their_scales(implementation: str, form: str) -> None:
    """Gathered from quantised tokens, and spread out and quantised as one op; of ids of no group and twice of one."""
    ids = jnp.asarray([[2, 0], [-1, 1], [0, 2], [3, -7], [2, 2]], jnp.int32)
    of_rows = np.array([0, 2, 1, 0, 2, 4, 4])
    tokens = jnp.asarray(rng.standard_normal((5, 64)), jnp.bfloat16)
    x = FORMATS[form](tokens)
    gathered = gather_rows(x, schedule_rows(ids, 3), implementation=implementation)
    schedule, spread = spread_rows(tokens, ids, 3, out_format=form, implementation=implementation)
    np.testing.assert_array_equal(schedule.group_sizes, [2, 1, 4])
    np.testing.assert_array_equal(schedule.row, [[3, 0], [-1, 2], [1, 4], [-1, -1], [5, 6]])
    np.testing.assert_array_equal(schedule.token, [*of_rows, 1, 3, 3])
    for rows in (gathered, spread):
        jax.tree.map(lambda row, token: assert_same_bits(row[:7], token[of_rows]), rows, x)
    none = gather_rows(x, schedule_rows(ids[:, :0], 3), implementation=implementation)
    _, no_token = spread_rows(tokens[:0], ids[:0], 3, out_format=form, implementation=implementation)
    assert none.shape == no_token.shape == (0, 64)


def test_tokens_spread_out_in_a_batch_and_in_formats_that_exist() -> None:
    ids, tokens = jnp.asarray([[[1, 0]], [[-1, 0]]], jnp.int32), jnp.ones((1, 32), jnp.bfloat16)
    schedule, rows = jax.vmap(lambda ids: spread_rows(tokens, ids, 2))(ids)
    np.testing.assert_array_equal(schedule.row, [[[1, 0]], [[-1, 0]]])
    assert rows.shape == (2, 2, 32)
    with pytest.raises(ValueError, match="out_format='f32' is not one of bf16, mxfp8, fp8_token"):
        spread_rows(tokens, ids[0], 2, out_format="f32")


@pytest.mark.parametrize("op", ["gather_rows", "combine_rows"])
def test_kernels_come_first_where_they_can(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotImplementedError, match="cannot run on implementation 'triton'"):
        explain(op, implementation="triton")
    monkeypatch.setattr(select, "why_not_on_gpu", lambda name, recipe: None)
    assert explain(op, x=jnp.zeros((2, 64), jnp.bfloat16)).chosen == "mosaic"
    odd = jnp.zeros((2, 3), jnp.bfloat16)
    assert "moves 16 at a time" in explain(op, x=odd).others["mosaic"]
    assert "takes bfloat16" in explain(op, x=odd.astype(jnp.float32)).others["mosaic"]


def test_without_a_kernel_what_waits_is_x_itself() -> None:
    x = jnp.arange(24, dtype=jnp.bfloat16).reshape(3, 8)
    assert_same_bits(jax.vmap(after)(x, jnp.full((3, 2), jnp.nan)), x)
    assert not jax.jit(lambda x: after(x, x[0])).lower(x).as_text().count("copy")
    with pytest.raises(NotImplementedError, match="after cannot run on implementation 'triton'"):
        after(x, x, implementation="triton")


def test_only_little_is_copied_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "why_not_on_gpu", lambda name, recipe: None)
    assert explain("after", x=jax.ShapeDtypeStruct((64, 7168), jnp.bfloat16)).chosen == "mosaic"
    explained = explain("after", x=jax.ShapeDtypeStruct((128, 7168), jnp.bfloat16))
    assert explained.chosen == "xla"
    assert "more than 524288 elements" in explained.others["mosaic"]
