"""The Hopper kernel's weight layout: an exact inverse, the words that its decode expects, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import MXFP4Array
from pallas_kernels.grouped_matmul import kernel_layout
from pallas_kernels.grouped_matmul.kernel_layout import from_kernel_layout, to_kernel_layout


def weights(rng: np.random.Generator, shape: tuple[int, int, int], low: int = 118, high: int = 124) -> MXFP4Array:
    g, n, k = shape
    codes = rng.integers(0, 256, (g, n, k // 2), dtype=np.uint8)
    return MXFP4Array(jnp.array(codes), jnp.array(rng.integers(low, high, (g, n, k // 32), dtype=np.uint8)))


def with_scale(w: MXFP4Array, expert: int, byte: int, zero: bool = False) -> MXFP4Array:
    """The weights with one block's scale byte replaced and, if asked, its codes made zeros (some of them negative)."""
    codes = w.codes.at[expert, 0, :16].set(0x80) if zero else w.codes.at[expert, 0, 0].set(0x21)
    return MXFP4Array(codes, w.scales.at[expert, 0, 0].set(byte))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("recipe", ["w4a16", "w4a8", "w4a8_fp8"])
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), base=st.integers(0, 242))
def test_the_inverse_is_exact_at_any_base(recipe: str, gated: bool, seed: int, base: int) -> None:
    w = weights(np.random.default_rng(seed), (2, 128, 128), base, base + 12)
    back = from_kernel_layout(to_kernel_layout(w, recipe=recipe, gated=gated))
    np.testing.assert_array_equal(back.codes, w.codes)
    np.testing.assert_array_equal(back.scales, w.scales)


def test_each_expert_has_its_own_base() -> None:
    rng = np.random.default_rng(0)
    low, high = weights(rng, (1, 64, 64), 10, 20), weights(rng, (1, 64, 64), 200, 210)
    both = MXFP4Array(jnp.concatenate([low.codes, high.codes]), jnp.concatenate([low.scales, high.scales]))
    laid_out = to_kernel_layout(both, recipe="w4a8_fp8", gated=False)
    assert laid_out.exponents[1] - laid_out.exponents[0] > 150
    np.testing.assert_array_equal(from_kernel_layout(laid_out).scales, both.scales)


def test_a_words_shifts_leave_bfloat16_pairs() -> None:
    """The documented shifts, in NumPy: each register is 2^-126 times its two codes."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    w = weights(np.random.default_rng(1), (1, 64, 64))
    nibbles = np.stack([np.asarray(w.codes[0]) & 15, np.asarray(w.codes[0]) >> 4], -1).reshape(64, 64)
    truth = np.where(nibbles >= 8, -1, 1) * values[nibbles & 7]
    words = np.asarray(to_kernel_layout(w, recipe="w4a16", gated=False).words).reshape(-1)[:512].reshape(4, 8, 4, 4)
    for warp, g, t, i in np.ndindex(words.shape):
        word, (block, half) = int(words[warp, g, t, i]), divmod(i, 2)
        rotated = (word >> 6 | word << 26) & 0xFFFFFFFF
        pairs = [word & 0x81C081C0, word << 6 & 0x81C081C0, rotated & 0x81C081C0]
        pairs.append(word << 4 & 0x81808180 | word >> 4 & 0x00400040)
        row = 16 * warp + 8 * half + g
        for pair, bits in enumerate(pairs):
            column = 32 * block + 8 * pair + 2 * t
            floats = np.array([bits << 16 & 0xFFFFFFFF, bits & 0xFFFF0000], np.uint32).view(np.float32)
            np.testing.assert_array_equal(floats.astype(np.float64) * 2.0**126, truth[row, column : column + 2])


def test_gate_and_up_of_a_feature_share_a_thread() -> None:
    order = kernel_layout.row_order(256, gated=True).reshape(-1, 2, 8)
    np.testing.assert_array_equal(order[:, 1] - order[:, 0], np.full((16, 8), 128))


@pytest.mark.parametrize(("recipe", "span"), [("w4a16", 126), ("w4a8_fp8", 12)])
def test_the_stated_span_is_taken_and_one_more_is_refused_by_name(recipe: str, span: int) -> None:
    w = weights(np.random.default_rng(2), (4, 64, 64), 150, 151)
    widest = with_scale(w, 2, 150 - span + 1)
    np.testing.assert_array_equal(
        from_kernel_layout(to_kernel_layout(widest, recipe=recipe, gated=False)).scales, widest.scales
    )
    with pytest.raises(NotImplementedError, match=f"expert 2: scale bytes from {150 - span} to 150"):
        to_kernel_layout(with_scale(w, 2, 150 - span), recipe=recipe, gated=False)


@pytest.mark.parametrize("recipe", ["w4a16", "w4a8_fp8"])
def test_an_all_zero_block_of_scale_byte_0_is_kept(recipe: str) -> None:
    w = with_scale(weights(np.random.default_rng(3), (2, 64, 64)), 1, 0, zero=True)
    back = from_kernel_layout(to_kernel_layout(w, recipe=recipe, gated=False))
    np.testing.assert_array_equal(back.codes, w.codes)
    np.testing.assert_array_equal(back.scales, w.scales)


def test_a_nan_scale_is_refused_by_name() -> None:
    w = with_scale(weights(np.random.default_rng(4), (3, 64, 64)), 1, 255)
    with pytest.raises(NotImplementedError, match="expert 1 has a NaN scale"):
        to_kernel_layout(w, recipe="w4a16", gated=False)


def test_shapes_and_recipes_are_checked() -> None:
    rng = np.random.default_rng(5)
    with pytest.raises(NotImplementedError, match="multiples of 64"):
        to_kernel_layout(weights(rng, (1, 32, 64)), recipe="w4a16", gated=False)
    with pytest.raises(ValueError, match="recipe='bf16'"):
        to_kernel_layout(weights(rng, (1, 64, 64)), recipe="bf16", gated=False)
    flat = MXFP4Array(jnp.zeros((64, 32), jnp.uint8), jnp.zeros((64, 2), jnp.uint8))
    with pytest.raises(ValueError, match=r"\[G, N, K\]"):
        to_kernel_layout(flat, recipe="w4a16", gated=False)


def test_it_is_a_pytree_that_keeps_its_static_part() -> None:
    laid_out = to_kernel_layout(weights(np.random.default_rng(6), (2, 128, 64)), recipe="w4a16", gated=True)
    assert laid_out.shape == (2, 128, 64)
    again = jax.jit(lambda w: w)(laid_out)
    assert (again.mma, again.gated, again.shape) == ("bf16", True, (2, 128, 64))
