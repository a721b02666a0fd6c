"""`grouped_matmul` against float64: every recipe, result format and pattern of groups, by each implementation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, KIMI, Case, Operands, make_operands, make_weights
from format_truth import decode_mxfp4, decode_mxfp8, encode_fp8_token, encode_mxfp8
from gemm_truth import activate, grouped_input_gradient, grouped_product
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import KERNEL_TOLERANCES, as_float64, assert_close, assert_same_bits, relative_l2, round_bf16

from pallas_kernels import MXFP4Array, MXFP8Array, Situ, TokenScaledArray, grouped_matmul, quantize_mxfp4

IMPLEMENTATIONS = ("reference", "xla")


compiled = jax.jit(grouped_matmul, static_argnames=("activation", "out_format", "implementation"))


def decoded(operand: Any) -> np.ndarray:
    """Any operand or result as float64, by the truth's tables."""
    if isinstance(operand, MXFP4Array):
        return decode_mxfp4(np.asarray(operand.codes), np.asarray(operand.scales))
    if isinstance(operand, MXFP8Array):
        return decode_mxfp8(np.asarray(operand.values), np.asarray(operand.scales))
    if isinstance(operand, TokenScaledArray):
        return as_float64(operand.values) * as_float64(operand.scales)
    return as_float64(operand)


def expected_rows(case: Case, operands: Operands) -> np.ndarray:
    """The rows that belong to a group, float64, in the values that the result's format leaves."""
    y = grouped_product(decoded(operands.x), decoded(operands.w), operands.group_sizes, case.activation)
    if case.out_format == "f32":
        return y
    y = round_bf16(y)
    if case.out_format == "mxfp8":
        return decode_mxfp8(*encode_mxfp8(y))
    if case.out_format == "fp8_token":
        values, scales = encode_fp8_token(y)
        return as_float64(values) * as_float64(scales)
    return y


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_equals_float64(case: Case, implementation: str) -> None:
    operands = make_operands(case)
    result: Any = compiled(
        operands.x,
        operands.w,
        jnp.asarray(operands.group_sizes),
        activation=case.activation,
        out_format=case.out_format,
        implementation=implementation,
    )
    assert result.shape == (case.rows, case.width // (2 if case.activation else 1))
    types = {"mxfp8": MXFP8Array, "fp8_token": TokenScaledArray}
    assert isinstance(result, types.get(case.out_format, jax.Array))
    if isinstance(result, jax.Array):
        assert result.dtype == (jnp.float32 if case.out_format == "f32" else jnp.bfloat16)
    used = int(operands.group_sizes.sum())
    got, expected = decoded(result)[:used], expected_rows(case, operands)
    tolerance = KERNEL_TOLERANCES[case.recipe]
    assert_close(got, expected, tolerance)
    for m in range(used):  # a single wrong row, or small rows among large ones, must not hide in the norm
        assert relative_l2(got[m], expected[m]) < 10 * tolerance.relative_l2
    if case.out_format == "f32" and case.activation is None:  # nothing is rounded but the float32 sum
        assert relative_l2(got, expected) < 1e-6


# ---- patterns of groups

SWEPT = Case("w4a16", 40, 5, 64, 32, activation=KIMI)


@pytest.fixture(scope="module")
def swept() -> dict[str, Any]:
    """One compiled function for each implementation, and operands, for tests that vary only the group sizes."""
    w = make_weights(SWEPT, np.random.default_rng(1))
    x = np.random.default_rng(2).standard_normal((SWEPT.rows, SWEPT.depth), np.float32)

    def call(implementation: str) -> Any:
        return jax.jit(lambda x, w, s: grouped_matmul(x, w, s, activation=KIMI, implementation=implementation))

    return {"x": round_bf16(x), "w": w, "w64": decoded(w), "calls": {name: call(name) for name in IMPLEMENTATIONS}}


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(0, 12), min_size=5, max_size=5))
def test_any_group_sizes_and_nan_beyond_the_last_group(swept: dict[str, Any], sizes: list[int]) -> None:
    stops = np.minimum(np.cumsum(sizes), SWEPT.rows)
    group_sizes = np.diff(stops, prepend=0).astype(np.int32)
    x = swept["x"].copy()
    x[stops[-1] :] = np.nan
    expected = round_bf16(grouped_product(x, swept["w64"], group_sizes, KIMI))
    for call in swept["calls"].values():
        got = call(jnp.asarray(x, jnp.bfloat16), swept["w"], jnp.asarray(group_sizes))
        assert_close(got[: stops[-1]], expected, KERNEL_TOLERANCES["w4a16"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fault_11_all_patterns_of_empty_groups_leak_nothing_forward_or_backward(implementation: str) -> None:
    rng = np.random.default_rng(3)
    x = round_bf16(rng.standard_normal((20, 32)))
    w = round_bf16(rng.standard_normal((8, 32, 32)) / 6)
    dy = round_bf16(rng.standard_normal((20, 16)))

    @jax.jit
    def run(sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
        row = jnp.arange(20)[:, None]
        beyond = row >= jnp.sum(sizes)
        rows = jnp.where(beyond, jnp.nan, jnp.asarray(x, jnp.bfloat16))
        weights = jnp.where(sizes[:, None, None] == 0, jnp.nan, jnp.asarray(w, jnp.bfloat16))  # never to be used
        cotangent = jnp.where(beyond, jnp.nan, jnp.asarray(dy, jnp.bfloat16))
        y, pullback = jax.vjp(
            lambda rows: grouped_matmul(rows, weights, sizes, activation=KIMI, implementation=implementation), rows
        )
        return y, pullback(cotangent)[0]

    for pattern in range(256):
        sizes = np.array([2 * (pattern >> g & 1) for g in range(8)], np.int32)
        used = int(sizes.sum())
        y, dx = run(jnp.asarray(sizes))
        assert_close(y[:used], round_bf16(grouped_product(x, w, sizes, KIMI)), KERNEL_TOLERANCES["bf16"])
        assert_close(dx, round_bf16(grouped_input_gradient(x, w, sizes, KIMI, dy)), KERNEL_TOLERANCES["bf16"])
        assert not np.asarray(dx[used:]).any()


def test_changing_the_group_sizes_compiles_nothing() -> None:
    traces = []

    @jax.jit
    def call(x: jax.Array, w: MXFP4Array, group_sizes: jax.Array) -> jax.Array:
        traces.append(x.shape)
        return grouped_matmul(x, w, group_sizes, activation=KIMI)

    operands = make_operands(SWEPT)
    x = jnp.ones((40, 32), jnp.bfloat16)
    for sizes in ([40, 0, 0, 0, 0], [8, 8, 8, 8, 8], [0, 0, 0, 0, 0], [1, 2, 3, 4, 5]):
        call(x, operands.w, jnp.array(sizes, jnp.int32)).block_until_ready()
    assert traces == [(40, 32)]


@pytest.mark.parametrize("out_format", ["bf16", "f32", "mxfp8", "fp8_token"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_rows_at_all(implementation: str, out_format: str) -> None:
    w = make_weights(SWEPT, np.random.default_rng(1))

    def call(x: jax.Array) -> Any:
        return grouped_matmul(
            x,
            w,
            jnp.zeros(5, jnp.int32),
            activation=KIMI,
            out_format=out_format,
            implementation=implementation,
        )

    for result in (call(jnp.zeros((0, 32), jnp.bfloat16)), jax.jit(call)(jnp.zeros((0, 32), jnp.bfloat16))):
        assert result.shape == (0, 32)


# ---- other faults


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("packed", [False, True])
def test_fault_5_gate_rows_come_first(implementation: str, packed: bool) -> None:
    x = jnp.zeros((1, 32), jnp.bfloat16).at[0, 0].set(1)
    dense = np.zeros((1, 64, 32), np.float32)
    dense[0, :32, 0], dense[0, 32:, 0] = 8, -1
    w = quantize_mxfp4(jnp.asarray(dense)) if packed else jnp.asarray(dense).astype(jnp.bfloat16)
    got = compiled(x, w, jnp.array([1]), activation=KIMI, out_format="f32", implementation=implementation)
    np.testing.assert_allclose(got, np.full((1, 32), -3.8527622), rtol=1e-6)
    assert abs(activate(KIMI, np.array(-1.0), np.array(8.0)) - np.asarray(got)[0, 0]) > 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fault_6_betas_are_honoured(implementation: str) -> None:
    operands = make_operands(Case("bf16", 24, 2, 64, 64, "balanced"))
    x, sizes = operands.x * jnp.bfloat16(8), jnp.asarray(operands.group_sizes)
    results = {}
    for betas in ((5.0, 20.0), (4.0, 25.0), (5.0, 25.0), (4.0, 20.0)):
        y = compiled(x, operands.w, sizes, activation=Situ(*betas), implementation=implementation)
        truth = grouped_product(decoded(x), decoded(operands.w), operands.group_sizes, Situ(*betas))
        assert_close(y, round_bf16(truth), KERNEL_TOLERANCES["bf16"])
        results[betas] = y
    for betas in results:
        assert betas == (5.0, 20.0) or relative_l2(results[betas], results[5.0, 20.0]) > 1e-2


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fault_1_a_nan_scale_shows_in_its_own_outputs_and_in_no_other(implementation: str) -> None:
    operands = make_operands(Case("w4a16", 8, 2, 32, 64, "balanced"))
    poisoned = MXFP4Array(operands.w.codes, operands.w.scales.at[1, 5, 1].set(255))
    y = np.asarray(compiled(operands.x, poisoned, jnp.array([4, 4]), implementation=implementation))
    expected = np.zeros((8, 32), bool)
    expected[4:, 5] = True
    np.testing.assert_array_equal(np.isnan(y.astype(np.float32)), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("recipe", ["w4a8", "w4a8_fp8"])
def test_fault_4_a_zero_and_a_poisoned_token_beside_good_ones(implementation: str, recipe: str) -> None:
    case = Case(recipe, 8, 2, 64, 64, "balanced", KIMI, "mxfp8" if recipe == "w4a8" else "fp8_token")
    operands = make_operands(case)
    scales = operands.x.scales.at[6].set(255 if recipe == "w4a8" else jnp.nan)
    values = operands.x.values.at[1].set(0)
    y = decoded(
        compiled(
            type(operands.x)(values, scales),
            operands.w,
            jnp.array([4, 4]),
            activation=KIMI,
            out_format=case.out_format,
            implementation=implementation,
        )
    )
    assert not y[1].any()
    assert np.isnan(y[6]).all()
    others = [0, 2, 3, 4, 5, 7]
    assert_close(y[others], expected_rows(case, operands)[others], KERNEL_TOLERANCES[recipe])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fault_20_slices_transposed_views_and_donated_rows(implementation: str) -> None:
    rng = np.random.default_rng(4)
    big_x = jnp.asarray(rng.standard_normal((64, 96), np.float32)).astype(jnp.bfloat16)
    big_w = jnp.asarray(rng.standard_normal((3, 32, 96), np.float32)).astype(jnp.bfloat16)
    sizes = jnp.array([7, 0, 9], jnp.int32)

    def call(x: jax.Array, w: jax.Array) -> jax.Array:
        return grouped_matmul(x, w, sizes, implementation=implementation)

    def views(big_x: Any, big_w: Any) -> tuple[Any, Any]:
        return big_x[:32, 20:36].T, big_w[:, :, 8:72:2].swapaxes(1, 2)  # [16, 32] and [3, 32, 32]

    x, w = views(big_x, big_w)
    expected = np.asarray(call(x, w))
    truth = grouped_product(as_float64(x), as_float64(w), np.array([7, 0, 9]))
    assert_close(expected, round_bf16(truth), KERNEL_TOLERANCES["bf16"])
    assert_same_bits(jax.jit(lambda big_x, big_w: call(*views(big_x, big_w)))(big_x, big_w), expected)
    host = views(np.asarray(big_x), np.asarray(big_w))  # the same views, NumPy's
    assert_same_bits(call(jnp.asarray(host[0]), jnp.asarray(host[1])), expected)
    given_away = x + 0  # NumPy still looks at x
    assert_same_bits(jax.jit(call, donate_argnums=0)(given_away, w), expected)  # of the result's shape, so reused
    assert given_away.is_deleted()
