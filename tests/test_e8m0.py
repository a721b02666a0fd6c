"""Powers of two from bits: exact over the whole float32 range, where arithmetic flushes or loses the last bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from format_truth import powers_of_two, scale_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import assert_same_bits

from pallas_kernels import e8m0


def spread_of_floats() -> np.ndarray:
    """Finite float32 values: every exponent, both signs, the mantissas at either end and a random one."""
    rng = np.random.default_rng(1)
    exponent = np.arange(255, dtype=np.uint32)[:, None] << 23
    mantissa = np.concatenate([np.array([0, 1, 0x40_0000, 0x7F_FFFF]), rng.integers(0, 1 << 23, 4)]).astype(np.uint32)
    magnitude = (exponent | mantissa).ravel()
    return np.concatenate([magnitude, magnitude | np.uint32(1 << 31)]).view(np.float32)


def test_decompose_then_compose_is_the_identity_on_every_exponent() -> None:
    x = spread_of_floats()
    assert_same_bits(jax.lax.bitcast_convert_type(e8m0.compose(*e8m0.decompose(jnp.asarray(x))), jnp.float32), x)
    negative, significand, exponent = (np.asarray(part) for part in e8m0.decompose(jnp.asarray(x)))
    assert (significand[x != 0] >= 1 << 23).all()
    assert (significand < 1 << 24).all()
    value = np.where(negative, -1.0, 1.0) * np.ldexp(significand.astype(np.float64), exponent - 23)
    np.testing.assert_array_equal(value, x.astype(np.float64))


@pytest.mark.parametrize("exponent", [-300, -254, -149, -127, -24, -1, 0, 1, 23, 127, 254, 300])
def test_multiplying_by_a_power_of_two_is_exact_truncated_or_infinite(exponent: int) -> None:
    x = spread_of_floats()
    product = e8m0.times_power_of_two(jnp.asarray(x), jnp.full(x.shape, exponent))
    exact = np.ldexp(x.astype(np.float64), exponent)
    step = 2.0**-149
    truncated = np.copysign(np.floor(np.abs(exact) / step) * step, exact)
    with np.errstate(over="ignore"):  # infinite beyond the range
        expected = np.where(np.abs(exact) < 2.0**-126, truncated, exact).astype(np.float32)
    assert_same_bits(product, expected)


def test_faults_1_and_2_scale_bytes_are_exponents_and_both_ends_are_right() -> None:
    ones = jnp.ones((256, 32), jnp.float32)
    scales = jnp.arange(256, dtype=jnp.uint8)[:, None]
    expected = np.repeat(powers_of_two()[:, None].astype(np.float32), 32, axis=1)
    for apply in (e8m0.apply_scale, jax.jit(e8m0.apply_scale)):
        values = np.asarray(apply(ones, scales))
        assert_same_bits(values, expected)
        by_hand = {0: 2.0**-127, 127: 1.0, 134: 128.0, 254: 2.0**127}
        assert {byte: float(values[byte, 0]) for byte in by_hand} == by_hand
        assert np.isnan(values[255]).all()


@pytest.mark.parametrize("largest", [6.0, 448.0])
def test_every_block_gets_the_smallest_scale_that_saturates_nothing(largest: float) -> None:
    x = np.abs(spread_of_floats())
    blocks = np.zeros((x.size, 32), np.float32)
    blocks[np.arange(x.size), np.arange(x.size) % 32] = x
    blocks[1::2] *= -1
    for scales in (e8m0.block_scales, jax.jit(e8m0.block_scales, static_argnums=1)):
        assert_same_bits(scales(jnp.asarray(blocks), largest), scale_bytes(blocks, largest))


@settings(max_examples=100)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(-160, 160))
def test_scaling_there_and_back_returns_what_stayed_in_range(x: float, exponent: int) -> None:
    value, power = jnp.full((1,), x, jnp.float32), jnp.full((1,), exponent)
    there = e8m0.times_power_of_two(value, power)
    back = e8m0.times_power_of_two(there, -power)
    scaled = abs(np.ldexp(np.float64(x), exponent))
    if scaled == 0 or 2.0**-126 <= scaled < 2.0**128:
        assert_same_bits(back, np.full((1,), x, np.float32))
