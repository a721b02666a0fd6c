"""Mosaic's kernels that order, move and norm rows, as the compiler wrote them: an interpreter runs them on NumPy."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_mosaic import Target
from interpreted_mosaic import compiled
from norm_truth import require_normed
from numpy.typing import NDArray

from pallas_kernels import MXFP8Array, TokenScaledArray, spread_rows
from pallas_kernels.row_kernels import mosaic_moves, mosaic_orders, mosaic_rows, mosaic_spread

SPECIAL = np.array([np.nan, -np.nan, 0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 3e38, -3e38, 1.0, -1.0], np.float32)
LEAST, MOST = np.iinfo(np.int32).min, np.iinfo(np.int32).max


@pytest.mark.parametrize(("columns", "k"), [(1, 1), (7, 7), (33, 5), (112, 16), (112, 112), (896, 16), (1024, 8)])
def test_the_largest_are_those_of_a_stable_sort(
    columns: int, k: int, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ordinary numbers, of many equal ones, of zeros and NaNs of both signs, of any bits, and of one number."""
    rng = np.random.default_rng(columns)
    values = np.stack(
        [
            rng.standard_normal(columns).astype(np.float32),
            rng.integers(-3, 3, columns).astype(np.float32),
            SPECIAL[rng.integers(0, len(SPECIAL), columns)],
            rng.integers(0, 1 << 32, columns, np.uint32).view(np.float32),
            np.full(columns, -7, np.float32),
        ]
    )
    kernel = compiled(functools.partial(mosaic_orders.top_k, k=k), [values], target, tmp_path, monkeypatch)
    (places,) = kernel(values)
    np.testing.assert_array_equal(places, np.argsort(-values, axis=1, kind="stable")[:, :k])


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("columns", "k"), [(7, 7), (112, 16), (101, 45)])
def test_weights_are_the_scores_picked(
    columns: int, k: int, renormalize: bool, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over their sum, in which five roundings of neighbouring sums, a quotient's and a product's may show."""
    rng = np.random.default_rng(columns)
    scores = rng.random((9, columns)).astype(np.float32)
    scores[4:] = np.round(64 * scores[4:]) / 64
    scores[1] = 0
    scores[2, 5], scores[3, :3] = np.nan, np.inf
    bias = np.round(8 * rng.standard_normal(columns)).astype(np.float32) / 64  # of whose sums many are equal
    weigh = functools.partial(mosaic_orders.top_k_weights, k=k, renormalize=renormalize, scale=2.5)
    ids, weights = compiled(weigh, [scores, bias], target, tmp_path, monkeypatch)(scores, bias)
    expected = np.argsort(-(scores + bias), axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(ids, expected)
    exact = np.take_along_axis(scores, expected, 1).astype(np.float64)
    with np.errstate(invalid="ignore"):
        exact = exact / (exact.sum(1, keepdims=True) + 1e-20) if renormalize else exact
    np.testing.assert_allclose(weights, 2.5 * exact, rtol=2**-21 if renormalize else 2**-24)


@pytest.mark.parametrize(
    ("tokens", "picks", "groups"),
    [(1, 1, 1), (1, 16, 896), (8, 16, 112), (43, 3, 5), (151, 16, 60), (333, 7, 13), (1031, 16, 2)],
)
def test_slots_are_in_the_order_of_a_stable_sort(
    tokens: int, picks: int, groups: int, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ids of any kind, those of no group too, of one group's only and of none's."""
    rng = np.random.default_rng(tokens)
    shape = tokens, picks
    mixed = rng.integers(-2, groups + 3, shape, np.int32)
    mixed[rng.random(shape) < 0.1] = LEAST
    mixed[rng.random(shape) < 0.1] = MOST
    schedule = functools.partial(mosaic_orders.schedule_rows, groups=groups)
    kernel = compiled(schedule, [mixed], target, tmp_path, monkeypatch)
    for ids in (mixed, np.full(shape, groups - 1, np.int32), np.full(shape, -1, np.int32)):
        token, row, sizes = kernel(ids)
        group = np.where((ids >= 0) & (ids < groups), ids, groups).reshape(-1)
        order = np.argsort(group, kind="stable")
        np.testing.assert_array_equal(token, order // picks)
        np.testing.assert_array_equal(row.reshape(-1), np.where(group < groups, np.argsort(order), -1))
        np.testing.assert_array_equal(sizes, np.bincount(group, minlength=groups + 1)[:groups])


@pytest.mark.parametrize(
    ("form", "tokens", "picks", "groups", "columns"),
    [("bf16", 1, 16, 3, 96), ("mxfp8", 5, 3, 33, 2176), ("fp8_token", 43, 7, 5, 2080)],
)
def test_a_few_slots_are_spread_out_as_by_one_op_after_the_other(
    form: str,
    tokens: int,
    picks: int,
    groups: int,
    columns: int,
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of ids of any kind, of one group's only and of none's; rows of any bits, of numbers and of zeros."""
    rng = np.random.default_rng(tokens)
    ids = rng.integers(-1, groups + 1, (tokens, picks), np.int32)
    x = rng.integers(0, 1 << 16, (tokens, columns), np.uint16).view(jnp.bfloat16)
    x[::2] = rng.standard_normal(x[::2].shape)
    x[1::5] = 0
    spread = functools.partial(mosaic_spread.spread_rows, groups=groups, out_format=form)
    kernel = compiled(lambda ids, x: spread(x, ids), [ids, x], target, tmp_path, monkeypatch)
    for given in (ids, np.full_like(ids, groups - 1), np.full_like(ids, -1), np.full_like(ids, LEAST)):
        results = kernel.words(given, x)
        expected = jax.tree.leaves(
            spread_rows(jnp.asarray(x), jnp.asarray(given), groups, out_format=form, implementation="reference")
        )
        held = int(expected[2].sum())
        for name, result, leaf in zip(("token", "row", "sizes", "values", "scales"), results, expected, strict=False):
            shape, rows = (leaf.shape[0], -1), held if name in ("values", "scales") else leaf.shape[0]
            written, bits, truth = (
                array.view(np.uint8).reshape(shape) for array in (result.written, result.words, np.asarray(leaf))
            )
            assert written[:rows].all(), name
            assert not written[rows:].any(), name
            np.testing.assert_array_equal(bits[:rows], truth[:rows], name)


def positions_of(tokens: int, slots: int, rows: int) -> NDArray[Any]:
    """Rows in any order, each at most once, and of every fifth slot none."""
    positions = np.random.default_rng(tokens).permutation(rows)[: tokens * slots].reshape(tokens, slots)
    positions.reshape(-1)[1::5] = -1
    return positions.astype(np.int32)


@pytest.mark.parametrize("form", ["bf16", "mxfp8", "fp8_token"])
def test_rows_are_their_tokens(form: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any bits; and rows that no position names are left as they are."""
    tokens, columns, rows = 9, 128, 33
    rng = np.random.default_rng(0)
    positions = positions_of(tokens, 3, rows)

    def bits(columns: int, dtype: Any) -> NDArray[Any]:
        return rng.integers(0, 256, (tokens, columns * np.dtype(dtype).itemsize), np.uint8).view(dtype)

    def gather(positions: jax.Array, *leaves: jax.Array) -> Any:
        x: Any = leaves[0] if form == "bf16" else (MXFP8Array if form == "mxfp8" else TokenScaledArray)(*leaves)
        return mosaic_moves.gather_rows(x, positions, rows)

    scales = {"bf16": [], "mxfp8": [bits(columns // 32, np.uint8)], "fp8_token": [bits(1, np.float32)]}[form]
    leaves = [bits(columns, jnp.bfloat16 if form == "bf16" else jnp.float8_e4m3fn), *scales]
    results = compiled(gather, [positions, *leaves], target, tmp_path, monkeypatch).words(positions, *leaves)
    token, slot = np.nonzero(positions >= 0)
    named = positions[token, slot]
    for leaf, result in zip(leaves, results, strict=True):
        words, written = result.words.reshape(rows, -1), result.written.reshape(rows, -1)
        np.testing.assert_array_equal(words[named], leaf.view(np.uint32)[token])
        np.testing.assert_array_equal(written.all(1), written.any(1))
        np.testing.assert_array_equal(np.flatnonzero(written[:, 0]), np.sort(named))


@pytest.mark.parametrize(("tokens", "slots", "columns"), [(1, 1, 8), (9, 3, 64), (5, 20, 72)])
def test_sums_are_those_of_the_rows_named(
    tokens: int, slots: int, columns: int, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of numbers whose sums are exact; rows that no position names, and weights of no row, are NaN."""
    rng = np.random.default_rng(tokens)
    rows = np.full((tokens * slots + 2, columns), np.nan, jnp.bfloat16)
    positions = positions_of(tokens, slots, len(rows))
    is_named = positions >= 0
    rows[positions[is_named]] = rng.integers(-128, 129, (is_named.sum(), columns))
    weights = np.where(is_named, rng.integers(-64, 65, positions.shape) / 64, np.nan).astype(np.float32)
    kernel = compiled(mosaic_moves.combine_rows, [rows, positions, weights], target, tmp_path, monkeypatch)
    sums = np.zeros((tokens, columns), np.float32)
    for token, slot in zip(*np.nonzero(is_named), strict=True):
        sums[token] += rows[positions[token, slot]].astype(np.float32) * weights[token, slot]
    np.testing.assert_array_equal(kernel(rows, positions, weights)[0], sums)


@pytest.mark.parametrize("shape", [(1, 8), (3, 344)])
def test_a_copy_that_waits_has_the_bits_of_x(
    shape: tuple[int, ...], target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(0).integers(0, 1 << 16, shape, np.uint16).view(jnp.bfloat16)
    kernel = compiled(lambda x: mosaic_moves.after(x, x), [x], target, tmp_path, monkeypatch)  # it reads `x` alone
    (y,) = kernel(x)
    np.testing.assert_array_equal(y.view(np.uint16), x.view(np.uint16))


@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (6, 264), (3, 4096)])
def test_rows_are_normed(
    rows: int, columns: int, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(rows)
    x = (rng.standard_normal((rows, columns)) * np.exp(rng.uniform(-9, 9, (rows, 1)))).astype(np.float32)
    gain = rng.standard_normal(columns).astype(jnp.bfloat16)
    kernel = compiled(functools.partial(mosaic_rows.rms_norm, 1e-5), [x, gain], target, tmp_path, monkeypatch)
    (y,) = kernel(x, gain)
    require_normed(y, x, gain, 1e-5)
