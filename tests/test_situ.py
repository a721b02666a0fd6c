"""SiTU and SwiGLU against their float64 formulas, forward and gradient, small inputs relatively."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from annotations import unchecked_annotations
from gemm_truth import activate as truth
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import assert_same_bits, relative_l2

from pallas_kernels import Activation, Situ, SwiGLU, situ_and_mul, swiglu_and_mul

KIMI = Situ(4.0, 25.0)
ACTIVATIONS = [KIMI, Situ(5.0, 20.0), Situ(1.0, None), Situ(0.5, 3.0), SwiGLU()]
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


def run(activation: Activation, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """The public function on arrays of one shape `[..., F]`."""
    gate_up = jnp.asarray(np.concatenate([gate, up], axis=-1))
    if isinstance(activation, SwiGLU):
        return np.asarray(swiglu_and_mul(gate_up))
    return np.asarray(situ_and_mul(gate_up, beta=activation.beta, linear_beta=activation.linear_beta))


def grid() -> tuple[np.ndarray, np.ndarray]:
    """Pairs of float32: a dense middle, values far beyond the betas, and both signs of 1e-7..1e-3."""
    small = np.logspace(-7, -3, 9)
    side = np.concatenate([np.linspace(0.01, 12, 60), np.array([20, 40, 80]), small])
    axis = np.concatenate([-side, side]).astype(np.float32)
    gate, up = np.meshgrid(axis, np.concatenate([axis, np.array([300, -300], np.float32)]), indexing="ij")
    return gate, up


# ---- values


@pytest.mark.parametrize(
    ("betas", "gate", "up", "expected"),
    [
        ((4.0, 25.0), 1, 1, 0.7158178280748405),
        ((4.0, 25.0), 2, -3, -4.861066551249868),
        ((4.0, 25.0), 10, 50, 95.10802153401491),
        ((4.0, 25.0), -10, 50, -0.004317897497493173),
        ((4.0, 25.0), 30, 1000, 99.99993881954526),
        ((1.0, None), 2, -3, -2.547338026862606),
    ],
)
def test_the_published_values(betas: tuple[float, float | None], gate: float, up: float, expected: float) -> None:
    pair = np.array([gate], np.float32), np.array([up], np.float32)
    assert float(truth(Situ(*betas), *pair)[0]) == pytest.approx(expected, rel=1e-13)
    assert float(run(Situ(*betas), *pair)[0]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_a_dense_grid_is_right_relatively_small_inputs_too(activation: Activation) -> None:
    gate, up = grid()
    expected = truth(activation, gate, up)
    error = np.abs(run(activation, gate, up) - expected) / np.abs(expected)
    ordinary = np.abs(expected) > 1e-30  # beyond, float32 runs out
    assert ordinary.mean() > 0.95
    assert error[ordinary].max() < 5e-6
    tiny = (np.abs(gate) <= 1e-3) & (np.abs(up) <= 1e-3)
    assert tiny.any()
    assert error[tiny].max() < 1e-6


def test_fault_23_no_linear_beta_leaves_the_up_branch_alone() -> None:
    gate, up = grid()
    got = run(Situ(1.0, None), gate, up)
    assert relative_l2(got, truth(Situ(1.0, None), gate, up)) < 1e-6
    assert relative_l2(got, truth(Situ(1.0, 1.0), gate, up)) > 1
    large = np.array([5.0], np.float32), np.array([1e6], np.float32)
    assert run(Situ(1.0, None), *large)[0] == pytest.approx(993_261, rel=1e-3)


def test_fault_6_betas_are_honoured_and_the_activations_differ() -> None:
    gate, up = grid()
    assert relative_l2(run(Situ(5.0, 20.0), gate, up), truth(Situ(5.0, 20.0), gate, up)) < 1e-6
    for other in (Situ(5.0, 20.0), Situ(4.0 * 1.05, 25.0), Situ(4.0, 25.0 * 1.05), Situ(4.0, None), SwiGLU()):
        assert relative_l2(run(KIMI, gate, up), truth(other, gate, up)) > 1e-2


def test_the_sigmoid_sees_the_raw_gate() -> None:
    gate, up = np.array([12.0], np.float32), np.array([1.0], np.float32)
    bounded = 4 * np.tanh(3.0)
    wrong = bounded / (1 + np.exp(-bounded)) * 25 * np.tanh(1 / 25)
    assert abs(run(KIMI, gate, up)[0] / wrong - 1) > 1e-2


@settings(max_examples=200)
@given(*(st.floats(-(2.0**60), 2.0**60, width=32) for _ in range(2)))
def test_the_output_never_leaves_its_bounds(gate: float, up: float) -> None:
    value = np.asarray(KIMI(jnp.full((1,), gate, jnp.float32), jnp.full((1,), up, jnp.float32)))
    assert np.isfinite(value).all()
    assert np.abs(value).max() <= 100


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bounds_hold_after_rounding_at_the_ends_of_every_dtype(dtype: type[np.generic]) -> None:
    largest = ml_dtypes.finfo(dtype).max
    ends = np.array([largest, -largest, 0, np.inf, -np.inf], dtype)
    gate, up = np.meshgrid(ends, ends, indexing="ij")
    value = run(KIMI, gate, up).astype(np.float32)
    assert (np.abs(value) <= 100).all()  # NaN would fail
    assert value[0, 0] == 100
    assert value[3, 4] == -100
    assert np.isnan(run(KIMI, np.array([np.nan], dtype), np.array([1], dtype)).astype(np.float32)).all()


# ---- dtypes and shapes


@pytest.mark.parametrize("activation", [KIMI, SwiGLU()], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_computed_in_float32_and_rounded_once(dtype: type[np.generic], activation: Activation) -> None:
    rng = np.random.default_rng(0)
    gate, up = (rng.uniform(-8, 8, (64, 32)).astype(dtype) for _ in range(2))
    got = run(activation, gate, up)
    assert got.dtype == dtype
    expected = truth(activation, gate, up)
    half_an_ulp = float(ml_dtypes.finfo(dtype).eps) / 2
    error = np.abs(got.astype(np.float64) - expected) / np.abs(expected)
    normal = np.abs(expected) >= float(ml_dtypes.finfo(dtype).smallest_normal)
    assert normal.mean() > 0.9
    assert error[normal].max() < half_an_ulp + 2e-6


@pytest.mark.parametrize("lead", [(), (1,), (0,), (5,), (2, 3, 4)])
def test_any_leading_shape_and_the_first_half_is_the_gate(lead: tuple[int, ...]) -> None:
    gate_up = np.random.default_rng(1).standard_normal((*lead, 12)).astype(np.float32)
    expected = truth(KIMI, gate_up[..., :6], gate_up[..., 6:])
    for implementation in (None, "reference", "xla"):
        got = situ_and_mul(jnp.asarray(gate_up), beta=4.0, linear_beta=25.0, implementation=implementation)
        assert got.shape == (*lead, 6)
        np.testing.assert_allclose(got, expected, rtol=5e-6)


def test_fault_5_gate_and_up_are_not_interchangeable() -> None:
    gate_up = jnp.concatenate([jnp.full((1, 32), 8.0), jnp.full((1, 32), -1.0)], axis=-1)
    got = np.asarray(situ_and_mul(gate_up, beta=4.0, linear_beta=25.0))
    np.testing.assert_allclose(got, np.full((1, 32), -3.8527622), rtol=1e-6)
    swapped = truth(KIMI, np.array([-1.0]), np.array([8.0]))
    assert abs(got[0, 0] - swapped[0]) > 1


def test_under_jit_and_vmap_it_gives_the_same_and_activations_are_static_arguments() -> None:
    gate_up = jnp.asarray(np.random.default_rng(2).standard_normal((3, 4, 12)).astype(np.float32))

    def apply(gate_up: jax.Array) -> jax.Array:
        return situ_and_mul(gate_up, beta=4.0, linear_beta=25.0)

    plain = apply(gate_up)
    np.testing.assert_allclose(jax.jit(apply)(gate_up), plain, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(apply)(gate_up), plain, rtol=1e-6)
    call = jax.jit(lambda activation, gate, up: activation(gate, up), static_argnums=0)
    for activation in (Situ(4.0, 25.0), SwiGLU()):
        assert activation in {Situ(4.0, 25.0), SwiGLU()}  # hashable, equal by value
        assert call(activation, jnp.ones(2), jnp.ones(2)).shape == (2,)


# ---- gradients


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_gradients_equal_float64_central_differences(activation: Activation) -> None:
    gate, up = grid()
    step = 1e-6
    wide = gate.astype(np.float64), up.astype(np.float64)
    d_gate = (truth(activation, wide[0] + step, wide[1]) - truth(activation, wide[0] - step, wide[1])) / (2 * step)
    d_up = (truth(activation, wide[0], wide[1] + step) - truth(activation, wide[0], wide[1] - step)) / (2 * step)
    _, pullback = jax.vjp(activation, jnp.asarray(gate), jnp.asarray(up))
    got_gate, got_up = (np.asarray(part) for part in pullback(jnp.ones(gate.shape)))
    assert np.isfinite(got_gate).all()
    assert np.isfinite(got_up).all()
    # Row by row, so that gates of 1e-7 are not judged by the size of others.
    for got, expected in ((got_gate.T, d_gate.T), (got_up, d_up)):
        for row, expected_row in zip(got, expected, strict=True):
            if np.abs(expected_row).max() > 1e-8:  # below it, the differences are rounding
                assert relative_l2(row, expected_row) < 2e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fused_gradient_has_the_dtype_of_its_input_and_saturates_to_zero(dtype: type[np.generic]) -> None:
    gate_up = jnp.asarray(np.array([[1, 500, -500, 2, 500, 3]], dtype))

    def total(gate_up: jax.Array) -> jax.Array:
        return situ_and_mul(gate_up, beta=4.0, linear_beta=25.0).astype(jnp.float32).sum()

    gradient = jax.grad(total)(gate_up)
    assert gradient.dtype == dtype
    values = np.asarray(gradient).astype(np.float64)
    one = np.float64(1e-6)
    expected = [
        (truth(KIMI, np.array(1 + one), np.array(2.0)) - truth(KIMI, np.array(1 - one), np.array(2.0))) / (2 * one),
        (truth(KIMI, np.array(1.0), np.array(2 + one)) - truth(KIMI, np.array(1.0), np.array(2 - one))) / (2 * one),
    ]
    np.testing.assert_allclose(values[0, [0, 3]], expected, rtol=2 * float(ml_dtypes.finfo(dtype).eps) + 1e-5)
    np.testing.assert_array_equal(values[0, [1, 2, 4, 5]], 0)


# ---- errors


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e39, 1e-46])
def test_betas_that_float32_cannot_divide_by_raise(value: float) -> None:
    with pytest.raises(ValueError, match=r"Situ: beta=.* must be positive and finite"):
        Situ(value, 25.0)
    with pytest.raises(ValueError, match=r"Situ: linear_beta=.* must be positive and finite"):
        situ_and_mul(jnp.ones((1, 2)), beta=4.0, linear_beta=value)


@pytest.mark.parametrize("value", [None, True, "4"])
def test_betas_that_are_no_numbers_raise_with_kimi_s(value: Any) -> None:
    with unchecked_annotations(), pytest.raises(ValueError, match=r"Situ: beta=.* must be a number, .* beta=4.0"):
        Situ(value, 25.0)


def test_an_integer_beta_means_the_same_number() -> None:
    gate_up = jnp.asarray(np.linspace(-3, 3, 12, dtype=np.float32))
    with unchecked_annotations():
        got = situ_and_mul(gate_up, beta=4, linear_beta=25)
    assert_same_bits(got, situ_and_mul(gate_up, beta=4.0, linear_beta=25.0))


def test_odd_widths_scalars_and_unknown_implementations_raise() -> None:
    with pytest.raises(ValueError, match=r"gate_up has shape \(2, 5\); its last axis must hold gate and up"):
        swiglu_and_mul(jnp.ones((2, 5)))
    with unchecked_annotations(), pytest.raises(ValueError, match=r"gate_up has shape \(\)"):
        swiglu_and_mul(jnp.float32(1))
    with pytest.raises(NotImplementedError, match=r"'mosaic': it is written for compute capability 9\.0 or 10\.0"):
        situ_and_mul(jnp.ones((2, 4)), beta=4.0, linear_beta=25.0, implementation="mosaic")
