"""The comparison helpers reject what a comparison must reject: a check that cannot fail proves nothing."""

import numpy as np
import pytest
from numerics import KERNEL_TOLERANCES, Tolerance, assert_close, assert_same_bits, cosine, nonzero_share, relative_l2

LOOSEST = Tolerance(relative_l2=0.06, cosine=0.998)


def small_values() -> np.ndarray:
    return 0.04 * np.random.default_rng(0).standard_normal((64, 32))


def test_equal_arrays_and_a_bfloat16_error_pass() -> None:
    x = small_values()
    assert_close(x, x, KERNEL_TOLERANCES["bf16"])
    assert_close(x * (1 + 2.0**-9), x, KERNEL_TOLERANCES["bf16"])
    assert_close(np.zeros(3), np.zeros(3), KERNEL_TOLERANCES["bf16"])
    assert_close(np.zeros((0, 8)), np.zeros((0, 8)), KERNEL_TOLERANCES["bf16"])


def test_fault_7_zeros_do_not_pass_for_small_values() -> None:
    x = small_values()
    assert np.allclose(np.zeros_like(x), x, atol=0.2)  # what others' tests accepted
    with pytest.raises(AssertionError, match="relative L2 1"):
        assert_close(np.zeros_like(x), x, LOOSEST)
    with pytest.raises(AssertionError, match="non-zeros"):  # the norm hardly moves, and yet a tenth of them is gone
        assert_close(np.where(np.abs(x) < np.quantile(np.abs(x), 0.1), 0, x), x, LOOSEST)
    with pytest.raises(AssertionError, match="relative L2 inf"):
        assert_close(x, np.zeros_like(x), LOOSEST)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_one_value_that_is_no_number_fails_on_either_side(poison: float) -> None:
    x = small_values()
    spoiled = x.copy()
    spoiled[5, 7] = poison
    for pair in ((spoiled, x), (x, spoiled), (spoiled, spoiled)):
        with pytest.raises(AssertionError, match="NaN or infinite"):
            assert_close(*pair, LOOSEST)


def test_swapped_halves_one_doubled_row_and_a_wrong_shape_fail() -> None:
    x = small_values()
    with pytest.raises(AssertionError, match="relative L2"):
        assert_close(np.roll(x, 16, axis=1), x, LOOSEST)
    doubled = x.copy()
    doubled[3] *= 2
    with pytest.raises(AssertionError, match="relative L2"):
        assert_close(doubled, x, LOOSEST)
    with pytest.raises(AssertionError, match="shape"):
        assert_close(x[:1], x, LOOSEST)


def test_a_wrong_direction_fails_even_where_the_norm_would_allow_it() -> None:
    x = small_values()
    with pytest.raises(AssertionError, match="cosine"):
        assert_close(np.roll(x, 1, axis=1), x, Tolerance(relative_l2=2.0))


def test_the_measures_by_hand() -> None:
    assert relative_l2(np.array([3.0, 0.0]), np.array([3.0, 4.0])) == 0.8
    assert cosine(np.array([1.0, 0.0]), np.array([1.0, 1.0])) == pytest.approx(2**-0.5)
    assert cosine(np.zeros(2), np.ones(2)) == 0
    assert nonzero_share(np.array([0.0, -0.0, 1.0, np.nan])) == 0.5


def test_same_bits_sees_the_sign_of_zero_and_one_ulp_but_not_which_nan() -> None:
    nans = np.array([0x7FC00000, 0xFFC00001], np.uint32).view(np.float32)
    assert_same_bits(nans[:1], nans[1:])
    for wrong in (np.float32(-0.0), np.nextafter(np.float32(0), np.float32(1)), np.float32(np.nan)):
        with pytest.raises(AssertionError, match="1 of 1 differ"):
            assert_same_bits(np.array([wrong], np.float32), np.zeros(1, np.float32))
    with pytest.raises(AssertionError, match="float64"):
        assert_same_bits(np.zeros(1), np.zeros(1, np.float32))
