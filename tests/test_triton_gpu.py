"""The Triton kernels on a GPU, as `test_mosaic_hopper_gpu.py` has it for Hopper's: against float64, at the model's real
sizes, and over the patterns that break such kernels. Run with `pytest -m gpu` where JAX sees one."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from format_truth import decode_mxfp4
from gemm_truth import grouped_product
from numerics import KERNEL_TOLERANCES, Tolerance, assert_close, assert_same_bits, round_bf16
from test_mosaic_hopper_gpu import SIZES, check_groups, random_rows, random_weights, rows_as_float64

from pallas_kernels import (
    Activation,
    KernelWeights,
    MXFP4Array,
    Situ,
    SwiGLU,
    grouped_matmul,
    quantize_fp8_token,
    quantize_mxfp8,
    situ_and_mul,
    to_kernel_layout,
)

pytestmark = pytest.mark.gpu
KIMI = Situ(4.0, 25.0)


def product(x: Any, w: Any, sizes: Any, activation: Activation | None) -> jax.Array:
    return grouped_matmul(x, w, jnp.asarray(sizes, jnp.int32), activation=activation, implementation="triton")


def laid_out(w: MXFP4Array, activation: Activation | None) -> KernelWeights:
    return to_kernel_layout(w, recipe="w4a16", gated=activation is not None)


def check(
    sizes: np.ndarray, n: int, k: int, rows: int, recipe: str, activation: Activation | None, plain: bool
) -> None:
    w = random_weights(jax.random.key(n + k), len(sizes), n, k)
    x = random_rows(rows, k, int(sizes.sum()), recipe)
    y = product(x, w if plain else laid_out(w, activation), sizes, activation)
    check_groups(y, x, w, sizes, activation, recipe, np.flatnonzero(sizes).tolist())


@pytest.mark.parametrize("activation", [None, KIMI, Situ(1.0, None), SwiGLU()], ids=str)
@pytest.mark.parametrize("recipe", ["w4a16", "w4a8", "w4a8_fp8"])
def test_every_size_of_a_group(recipe: str, activation: Activation | None) -> None:
    check(np.array(SIZES), 512, 768, 1024, recipe, activation, plain=False)


@pytest.mark.parametrize("recipe", ["w4a16", "w4a8_fp8"])
def test_weights_as_the_checkpoint_has_them(recipe: str) -> None:
    check(np.array(SIZES), 512, 768, 1024, recipe, KIMI, plain=True)


@pytest.mark.parametrize("activation", [None, KIMI], ids=str)
def test_bfloat16_weights(activation: Activation | None) -> None:
    sizes = np.array(SIZES)
    w = random_weights(jax.random.key(1), len(sizes), 320, 416)
    x = random_rows(1024, 416, int(sizes.sum()), "w4a16")
    y = product(x, w.dequantize(jnp.bfloat16), sizes, activation)
    check_groups(y, x, w, sizes, activation, "bf16", np.flatnonzero(sizes).tolist())


@pytest.mark.parametrize("rows", [64, 200, 900])
def test_every_width_of_a_tile(rows: int) -> None:
    check(np.array([rows, 0, rows // 2, 1]), 256, 256, 2 * rows, "w4a16", KIMI, plain=False)


def test_every_pattern_of_empty_groups() -> None:
    w = random_weights(jax.random.key(0), 8, 256, 256)
    decoded = decode_mxfp4(np.asarray(w.codes), np.asarray(w.scales))
    words = laid_out(w, None)
    some = np.array([3, 24, 1, 9, 40, 8, 17, 2])
    for pattern in itertools.product((0, 1), repeat=8):
        sizes = some * pattern
        used = int(sizes.sum())
        x = random_rows(128, 256, used, "w4a16")
        y = np.asarray(product(x, words, sizes, None))[:used]
        expected = round_bf16(grouped_product(rows_as_float64(x, slice(0, used)), decoded, sizes))
        assert_close(y, expected, KERNEL_TOLERANCES["w4a16"])


@pytest.mark.parametrize("rows", [1, 5, 31])
def test_few_rows(rows: int) -> None:
    check(np.array([0, rows, 0]), 256, 256, rows, "w4a8", KIMI, plain=False)


@pytest.mark.parametrize("low", [0, 60, 200])
def test_scale_bytes_at_every_base_with_experts_far_apart(low: int) -> None:
    sizes = np.array([16, 16])
    near, far = (random_weights(jax.random.key(low), 1, 256, 256, at, at + 12) for at in (low, 118))
    w = MXFP4Array(jnp.concatenate([near.codes, far.codes]), jnp.concatenate([near.scales, far.scales]))
    x = random_rows(32, 256, 32, "w4a16")
    check_groups(product(x, laid_out(w, None), sizes, None), x, w, sizes, None, "w4a16", [0, 1])


def test_small_inputs_keep_their_relative_accuracy_through_the_activation() -> None:
    sizes = np.array([64])
    w = random_weights(jax.random.key(1), 1, 256, 256, 100, 104)
    x = random_rows(64, 256, 64, "w4a16")
    check_groups(product(x, laid_out(w, KIMI), sizes, KIMI), x, w, sizes, KIMI, "w4a16", [0])


@pytest.mark.parametrize("rows", [4096, 37376])
def test_500_repeats_are_equal_to_the_bit(rows: int) -> None:
    """256 experts with scales of their own, in narrow tiles and in tiles of two widths: a register or a stage that is
    written again too early shows as a flicker."""
    w = laid_out(random_weights(jax.random.key(2), 256, 512, 512), KIMI)
    x = random_rows(rows, 512, rows, "w4a16")
    sizes = jnp.full((256,), rows // 256, jnp.int32)
    first = product(x, w, sizes, KIMI)
    same = jax.jit(lambda a, b: (a.view(jnp.uint16) == b.view(jnp.uint16)).all())
    assert bool(jnp.stack([same(product(x, w, sizes, KIMI), first) for _ in range(500)]).all())


@pytest.mark.parametrize("rows", [128, 2048, 16384])
@pytest.mark.parametrize(("n", "k", "activation"), [(6144, 3584, KIMI), (3584, 3072, None)], ids=["w13", "w2"])
def test_the_real_sizes(n: int, k: int, activation: Activation | None, rows: int) -> None:
    w = random_weights(jax.random.key(3), 112, n, k)
    sizes = np.full(112, rows // 112)
    sizes[: rows % 112] += 1
    x = random_rows(rows, k, rows, "w4a16")
    check_groups(product(x, laid_out(w, activation), sizes, activation), x, w, sizes, activation, "w4a16", [0, 57, 111])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("quantize", [quantize_mxfp8, quantize_fp8_token], ids=["mxfp8", "fp8_token"])
def test_quantisers_equal_the_references_to_the_bit(quantize: Any, dtype: Any) -> None:
    key = jax.random.key(0)
    x = jax.random.normal(key, (300, 3584)) * jnp.exp2(jax.random.randint(key, (300, 1), -140, 120).astype(jnp.float32))
    x = x.at[0].set(0).at[1, 7].set(jnp.inf).at[2, 9].set(jnp.nan).astype(dtype)
    ours, theirs = (quantize(x, implementation=name) for name in ("triton", "reference"))
    assert_same_bits(ours.scales, theirs.scales)
    assert_same_bits(np.asarray(ours.values).view(np.uint8), np.asarray(theirs.values).view(np.uint8))


@pytest.mark.parametrize("reach", [1e-4, 1.0, 100.0])
def test_the_activation(reach: float) -> None:
    x = (reach * jax.random.normal(jax.random.key(0), (300, 6144))).astype(jnp.bfloat16)
    y = situ_and_mul(x, beta=4.0, linear_beta=25.0, implementation="triton")
    assert_close(y, situ_and_mul(x, beta=4.0, linear_beta=25.0, implementation="reference"), Tolerance(2e-4))
