"""Giving up small blocks so that a kernel can hold an expert: what is kept, what is lost, and that it is told."""

import jax.numpy as jnp
import numpy as np
from numerics import as_float64, assert_same_bits, relative_l2

from pallas_kernels import MXFP4Array
from pallas_kernels.grouped_matmul.narrowing import narrow


def random_weights(scale_bytes: np.ndarray, seed: int = 0) -> MXFP4Array:
    """`[G, 8, 64]` with random codes under the given bytes `[G, 8, 2]`."""
    codes = np.random.default_rng(seed).integers(0, 256, (scale_bytes.shape[0], 8, 32), np.uint8)
    return MXFP4Array(jnp.asarray(codes), jnp.asarray(scale_bytes))


def test_within_the_span_nothing_changes() -> None:
    for base in (0, 100, 243):
        scales = np.random.default_rng(1).integers(base, base + 12, (3, 8, 2)).astype(np.uint8)
        w = random_weights(scales)
        narrowed, changed, lost = narrow(w, span=12)
        assert_same_bits(narrowed.dequantize(jnp.float32), w.dequantize(jnp.float32))
        assert not changed.any()
        np.testing.assert_array_equal(lost, np.zeros(3))


def test_beyond_it_only_the_small_blocks_are_rounded() -> None:
    scales = np.full((2, 8, 2), 120, np.uint8)
    scales[1, 3, 1] = 118  # within a span of 2 of nothing: 120 and 119 remain
    scales[1, 4, 0] = 100  # far below: rounds to zero
    w = random_weights(scales)
    narrowed, changed, lost = narrow(w, span=2)
    before, after = as_float64(w.dequantize(jnp.float32)), as_float64(narrowed.dequantize(jnp.float32))
    assert np.unique(np.asarray(narrowed.scales[1])).tolist() == [119, 120]
    np.testing.assert_array_equal(after[0], before[0])
    np.testing.assert_array_equal(after[1, 4, :32], np.zeros(32))
    halves = before[1, 3, 32:] / 2.0**-8
    assert np.all(np.abs(after[1, 3, 32:] / 2.0**-8 - halves) <= 0.5)
    differs = before != after
    differs[1, 3, 32:] = differs[1, 4, :32] = False
    assert not differs.any()
    np.testing.assert_array_equal(changed, [False, True])
    np.testing.assert_allclose(lost, [0, relative_l2(after[1], before[1])], rtol=1e-5)


def test_the_loss_is_relative_at_any_base() -> None:
    scales = np.full((1, 8, 2), 20, np.uint8)
    scales[0, 0, 0] = 1
    low = narrow(random_weights(scales), span=12)[2]
    high = narrow(random_weights(scales + 230), span=12)[2]
    assert float(low[0]) > 0
    np.testing.assert_allclose(low, high, rtol=1e-6)


def test_a_change_too_small_for_float32_is_still_a_change() -> None:
    scales = np.full((2, 8, 2), 200, np.uint8)
    scales[1, 0, 0] = 0
    narrowed, changed, lost = narrow(random_weights(scales), span=126)
    np.testing.assert_array_equal(changed, [False, True])
    assert float(lost[1]) < 1e-30
    assert int(narrowed.scales[1].min()) == 75


def test_a_block_of_zeros_loses_nothing() -> None:
    w = random_weights(np.full((1, 8, 2), 200, np.uint8))
    w = MXFP4Array(w.codes.at[0, 2, :16].set(0), w.scales.at[0, 2, 0].set(0))
    narrowed, changed, _ = narrow(w, span=12)
    assert not changed.any()
    assert_same_bits(narrowed.dequantize(jnp.float32), w.dequantize(jnp.float32))
