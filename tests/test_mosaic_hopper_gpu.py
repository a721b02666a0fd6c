"""The grouped products of `mosaic` and `triton` on a Hopper GPU: against float64, at the model's real sizes, and over
the patterns that break such kernels. Run with `pytest -m gpu` where JAX sees one."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotations import unchecked_annotations
from format_truth import decode_mxfp4
from gemm_truth import grouped_product
from numerics import KERNEL_TOLERANCES, as_float64, assert_close, assert_same_bits, relative_l2, round_bf16

from pallas_kernels import (
    Activation,
    MXFP4Array,
    MXFP8Array,
    Situ,
    SwiGLU,
    TokenScaledArray,
    quantize_fp8_token,
    quantize_mxfp8,
)
from pallas_kernels import grouped_matmul as public_grouped_matmul
from pallas_kernels.grouped_matmul import config
from pallas_kernels.grouped_matmul.config import Tuning
from pallas_kernels.grouped_matmul.kernel_layout import UNIT_ROWS, KernelWeights, to_kernel_layout
from pallas_kernels.grouped_matmul.mosaic_hopper import grouped_matmul

pytestmark = pytest.mark.gpu
KIMI = Situ(4.0, 25.0)
QUANTIZERS = {"w4a8": jax.jit(quantize_mxfp8), "w4a8_fp8": jax.jit(quantize_fp8_token)}
SIZES = (0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 257)
OTHERS = Tuning((24, 40), 4, 1, 4, 3, costs=(2, 3)), Tuning((80,), 2, 2, 2, 3, costs=(4,))
TUNINGS = (
    Tuning((8, 16, 24, 32), 4, 1, 4, 4),
    Tuning((40, 80, 120, 152), 2, 2, 2, 3),
    Tuning((24, 256), 2, 1, 2, 2),
    Tuning((120,), 2, 2, 4, 2),
    Tuning((24,), 4, 2, 2, 3),
    Tuning((16,), 4, 3, 2, 3),
    Tuning((8, 40), 1, 2, 2, 4),
    Tuning((152,), 2, 1, 2, 3, OTHERS, (6,)),
)
# Rows of N that each of them cuts into tiles.
N = math.lcm(*(UNIT_ROWS * each.row_units for tuning in TUNINGS for each in tuning.launches))
kernel = jax.jit(grouped_matmul, static_argnames=("activation", "tuning", "out_format"))


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def random_weights(key: jax.Array, groups: int, n: int, k: int, low: int = 118, high: int = 124) -> MXFP4Array:
    codes, scales = jax.random.split(key)
    return MXFP4Array(
        jax.random.bits(codes, (groups, n, k // 2), jnp.uint8),
        jax.random.randint(scales, (groups, n, k // 32), low, high).astype(jnp.uint8),
    )


def random_rows(rows: int, k: int, used: int, recipe: str) -> jax.Array | MXFP8Array | TokenScaledArray:
    """Normal rows in the recipe's format; those beyond `used` are NaN."""
    x = jax.random.normal(jax.random.key(rows), (rows, k), jnp.bfloat16).at[used:].set(jnp.nan)
    return QUANTIZERS[recipe](x) if recipe in QUANTIZERS else x


def rows_as_float64(x: jax.Array | MXFP8Array | TokenScaledArray, rows: slice) -> np.ndarray:
    if isinstance(x, TokenScaledArray):
        return as_float64(x.values[rows]) * as_float64(x.scales[rows])
    return as_float64(x.dequantize(jnp.float32)[rows] if isinstance(x, MXFP8Array) else x[rows])


def check_groups(
    y: jax.Array,
    x: jax.Array | MXFP8Array | TokenScaledArray,
    w: MXFP4Array,
    sizes: np.ndarray,
    activation: Activation | None,
    recipe: str,
    some: list[int],
) -> None:
    """Compares the rows of some groups with float64."""
    ends = np.cumsum(sizes)
    for g in some:
        rows = slice(int(ends[g] - sizes[g]), int(ends[g]))
        weights = decode_mxfp4(np.asarray(w.codes[g : g + 1]), np.asarray(w.scales[g : g + 1]))
        expected = grouped_product(rows_as_float64(x, rows), weights, sizes[g : g + 1], activation)
        assert_close(np.asarray(y[rows]), round_bf16(expected), KERNEL_TOLERANCES[recipe])


def check(
    sizes: np.ndarray, n: int, k: int, rows: int, recipe: str, activation: Activation | None, tuning: Tuning | None
) -> None:
    w = random_weights(jax.random.key(n + k), len(sizes), n, k)
    x = random_rows(rows, k, int(sizes.sum()), recipe)
    laid_out = to_kernel_layout(w, recipe=recipe, gated=activation is not None)
    y = kernel(x, laid_out, jnp.asarray(sizes, jnp.int32), activation=activation, tuning=tuning)
    check_groups(y, x, w, sizes, activation, recipe, np.flatnonzero(sizes).tolist())


@pytest.mark.parametrize("activation", [None, KIMI, Situ(1.0, None), SwiGLU()], ids=str)
@pytest.mark.parametrize("recipe", ["w4a16", "w4a8", "w4a8_fp8"])
def test_every_size_of_a_group(recipe: str, activation: Activation | None) -> None:
    check(np.array(SIZES), 512, 768, 1024, recipe, activation, None)


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
@pytest.mark.parametrize("recipe", ["w4a16", "w4a8_fp8"])
def test_every_kind_of_tuning(recipe: str, tuning: Tuning) -> None:
    if recipe == "w4a8_fp8":  # whose products have twice the columns, and more sums
        widest = config.widest(tuning.warpgroups, tuning.units, "e4m3")
        widths = tuple(sorted({min(width, widest) for width in tuning.widths}))
        tuning = dataclasses.replace(tuning, k_units=max(2, tuning.k_units), widths=widths)
    check(np.array(SIZES)[::-1], N, 768, 900, recipe, KIMI, tuning)


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
@pytest.mark.parametrize("activation", [None, KIMI], ids=str)
def test_every_format_holds_the_same_numbers(activation: Activation | None, tuning: Tuning) -> None:
    sizes = np.array(SIZES)
    used = int(sizes.sum())
    w = random_weights(jax.random.key(7), len(sizes), N, 768)
    x = random_rows(900, 768, used, "w4a16")
    check_formats(x, w, sizes, "w4a16", activation, tuning)


@pytest.mark.parametrize("activation", [None, KIMI], ids=str)
def test_every_format_with_a_scale_a_token(activation: Activation | None) -> None:
    sizes = np.array([8, 0, 33, 1])
    w = random_weights(jax.random.key(8), len(sizes), 256, 512, 20, 26)
    check_formats(random_rows(48, 512, 42, "w4a8_fp8"), w, sizes, "w4a8_fp8", activation, None)


@pytest.mark.parametrize(("n", "k", "activation"), [(6144, 3584, KIMI), (3584, 3072, None)], ids=["w13", "w2"])
def test_every_format_at_the_real_sizes(n: int, k: int, activation: Activation | None) -> None:
    w = random_weights(jax.random.key(9), 112, n, k)
    x = random_rows(2048, k, 112 * 18, "w4a16")
    check_formats(x, w, np.full(112, 18), "w4a16", activation, None)


def check_formats(
    x: Any, w: MXFP4Array, sizes: np.ndarray, recipe: str, activation: Activation | None, tuning: Tuning | None
) -> None:
    """float32 rounds to the bfloat16 result, and quantised results are that one's, to the bit."""
    used = slice(0, int(sizes.sum()))
    laid_out = to_kernel_layout(w, recipe=recipe, gated=activation is not None)
    group_sizes = jnp.asarray(sizes, jnp.int32)
    rows, floats, blocks = (
        kernel(x, laid_out, group_sizes, activation=activation, tuning=tuning, out_format=out_format)
        for out_format in ("bf16", "f32", "mxfp8")
    )
    check_groups(rows, x, w, sizes, activation, recipe, np.flatnonzero(sizes)[-2:].tolist())
    assert floats.dtype == jnp.float32
    assert_same_bits(floats[used].astype(jnp.bfloat16), rows[used])
    if activation is None and recipe == "w4a16":  # the products are exact and nothing is rounded but their sums
        g = int(np.argmax(sizes > 1))
        own = slice(int(sizes[:g].sum()), int(sizes[: g + 1].sum()))
        weights = decode_mxfp4(np.asarray(w.codes[g : g + 1]), np.asarray(w.scales[g : g + 1]))
        assert relative_l2(floats[own], grouped_product(rows_as_float64(x, own), weights, sizes[g : g + 1])) < 1e-5
    q = quantize_mxfp8(rows[used], implementation="reference")
    assert_same_bits(blocks.values[used], q.values)
    assert_same_bits(blocks.scales[used], q.scales)
    if tuning is None:  # the public function's own choice
        tokens: Any = public_grouped_matmul(x, laid_out, group_sizes, activation=activation, out_format="fp8_token")
        t = quantize_fp8_token(rows[used], implementation="reference")
        assert_same_bits(tokens.values[used], t.values)
        assert_same_bits(tokens.scales[used], t.scales)


@pytest.mark.parametrize("recipe", ["w4a16", "w4a8_fp8"])
def test_every_pattern_of_empty_groups(recipe: str) -> None:
    w = random_weights(jax.random.key(0), 8, 256, 256)
    laid_out = to_kernel_layout(w, recipe=recipe, gated=False)
    decoded = decode_mxfp4(np.asarray(w.codes), np.asarray(w.scales))
    some = np.array([3, 24, 1, 9, 40, 8, 17, 2])
    for pattern in itertools.product((0, 1), repeat=8):
        sizes = some * pattern
        used = int(sizes.sum())
        x = random_rows(128, 256, used, recipe)
        y = np.asarray(kernel(x, laid_out, jnp.asarray(sizes, jnp.int32), activation=None))[:used]
        expected = round_bf16(grouped_product(rows_as_float64(x, slice(0, used)), decoded, sizes))
        assert_close(y, expected, KERNEL_TOLERANCES[recipe])


@pytest.mark.parametrize("expert", [0, 3, 7])
def test_one_group_with_everything(expert: int) -> None:
    check(np.where(np.arange(8) == expert, 1500, 0), 512, 512, 1500, "w4a16", KIMI, None)


@pytest.mark.parametrize("recipe", ["w4a16", "w4a8", "w4a8_fp8"])
@pytest.mark.parametrize("rows", [1, 5, 31])
def test_fewer_rows_than_one_copy_brings(recipe: str, rows: int) -> None:
    check(np.array([0, rows, 0]), 256, 256, rows, recipe, KIMI, None)


@pytest.mark.parametrize("recipe", ["w4a16", "w4a8_fp8"])
@pytest.mark.parametrize("low", [0, 60, 118, 200])
def test_scale_bytes_at_every_base_with_experts_far_apart(recipe: str, low: int) -> None:
    sizes = np.array([16, 16])
    near, far = (random_weights(jax.random.key(low), 1, 256, 256, at, at + 12) for at in (low, 118))
    w = MXFP4Array(jnp.concatenate([near.codes, far.codes]), jnp.concatenate([near.scales, far.scales]))
    x = random_rows(32, 256, 32, recipe)
    y = kernel(x, to_kernel_layout(w, recipe=recipe, gated=False), jnp.asarray(sizes, jnp.int32), activation=None)
    check_groups(y, x, w, sizes, None, recipe, [0, 1])


def test_small_inputs_keep_their_relative_accuracy_through_the_activation() -> None:
    """Gate and up of about 1e-4: a tanh good in absolute terms only would fail."""
    sizes = np.array([64])
    w = random_weights(jax.random.key(1), 1, 256, 256, 100, 104)
    x = random_rows(64, 256, 64, "w4a16")
    y = kernel(x, to_kernel_layout(w, recipe="w4a16", gated=True), jnp.asarray(sizes, jnp.int32), activation=KIMI)
    check_groups(y, x, w, sizes, KIMI, "w4a16", [0])


@pytest.mark.parametrize("rows", [16, 600])
def test_long_sums_of_one_sign(rows: int) -> None:
    """K 7168, nothing negative: summed in the fp8 tensor cores alone, 8 % would be lost."""
    w = random_weights(jax.random.key(4), 2, 512, 7168)
    w = MXFP4Array(w.codes & 0x77, w.scales)
    sizes = np.array([rows // 2, rows // 2])
    x = quantize_fp8_token(jnp.abs(jax.random.normal(jax.random.key(rows), (rows, 7168), jnp.bfloat16)))
    y = kernel(x, to_kernel_layout(w, recipe="w4a8_fp8", gated=False), jnp.asarray(sizes, jnp.int32), activation=None)
    check_groups(y, x, w, sizes, None, "w4a8_fp8", [0, 1])


@pytest.mark.parametrize("recipe", ["w4a16", "w4a8_fp8"])
def test_500_repeats_are_equal_to_the_bit(recipe: str) -> None:
    """256 experts with scales of their own: a stage read late shows as a flicker."""
    w = to_kernel_layout(random_weights(jax.random.key(2), 256, 512, 512), recipe=recipe, gated=True)
    x = random_rows(8192, 512, 8192, recipe)
    sizes = jnp.full((256,), 32, jnp.int32)
    first = kernel(x, w, sizes, activation=KIMI)
    same = jax.jit(lambda a, b: (a.view(jnp.uint16) == b.view(jnp.uint16)).all())
    assert bool(jnp.stack([same(kernel(x, w, sizes, activation=KIMI), first) for _ in range(500)]).all())


@pytest.mark.parametrize("rows", [128, 2048, 16384])
@pytest.mark.parametrize(("n", "k", "activation"), [(6144, 3584, KIMI), (3584, 3072, None)], ids=["w13", "w2"])
@pytest.mark.parametrize("recipe", ["w4a16", "w4a8_fp8"])
def test_the_real_sizes(recipe: str, n: int, k: int, activation: Activation | None, rows: int) -> None:
    w, laid_out = _real(112, n, k, recipe)
    sizes = np.full(112, rows // 112)
    sizes[: rows % 112] += 1
    x = random_rows(rows, k, rows, recipe)
    y = kernel(x, laid_out, jnp.asarray(sizes, jnp.int32), activation=activation)
    check_groups(y, x, w, sizes, activation, recipe, [0, 57, 111])


@functools.lru_cache(maxsize=1)
def _real(groups: int, n: int, k: int, recipe: str) -> tuple[MXFP4Array, KernelWeights]:
    w = random_weights(jax.random.key(3), groups, n, k)
    return w, to_kernel_layout(w, recipe=recipe, gated=n == 6144)


def test_all_896_experts_on_one_device() -> None:
    _real.cache_clear()
    w, laid_out = _real(896, 6144, 3584, "w4a16")
    sizes = np.where(np.arange(896) % 3 == 0, 5, 1)
    x = random_rows(2304, 3584, int(sizes.sum()), "w4a16")
    y = kernel(x, laid_out, jnp.asarray(sizes, jnp.int32), activation=KIMI)
    check_groups(y, x, w, sizes, KIMI, "w4a16", [0, 300, 895])
    _real.cache_clear()


def test_temporaries_stay_small() -> None:
    words: Any = jax.ShapeDtypeStruct((64, 64, 16 * 17, 32), jnp.uint32)
    exponents: Any = jax.ShapeDtypeStruct((64,), jnp.int32)
    x, sizes = jax.ShapeDtypeStruct((32768, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((64,), jnp.int32)
    with unchecked_annotations():  # these are shapes, not arrays
        laid_out = KernelWeights(words, exponents, "bf16", False)
        analysis = kernel.lower(x, laid_out, sizes, activation=None).compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 1 << 20


def test_sliced_and_donated_inputs() -> None:
    sizes = np.array([20, 0, 44])
    w = random_weights(jax.random.key(5), 3, 256, 256)
    laid_out = to_kernel_layout(w, recipe="w4a16", gated=False)
    big = random_rows(200, 512, 200, "w4a16")
    assert isinstance(big, jax.Array)
    x = big[11:75, ::2]
    y = jax.jit(grouped_matmul, static_argnames="activation", donate_argnums=0)(
        x + 0, laid_out, jnp.asarray(sizes, jnp.int32), activation=None
    )
    check_groups(y, x, w, sizes, None, "w4a16", [0, 2])
