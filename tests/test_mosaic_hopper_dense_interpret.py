"""The Hopper kernel of bfloat16 weights in Mosaic's interpreter, with the race detector on.

What the GPU alone can show is in test_mosaic_hopper_dense_gpu.py.
"""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from gemm_truth import grouped_product
from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import get_races, reset_gpu_interpret_mode_state
from jax.experimental.pallas import mosaic_gpu as plgpu
from numerics import KERNEL_TOLERANCES, as_float64, assert_close, relative_l2, round_bf16

from pallas_kernels import Activation, Situ, SwiGLU
from pallas_kernels.grouped_matmul.hopper.dense_config import DenseTuning
from pallas_kernels.grouped_matmul.mosaic_hopper_dense import grouped_matmul

ROWS, N, K = 24, 96, 256


@pytest.fixture(autouse=True)
def _clean_interpreter() -> Iterator[None]:
    reset_gpu_interpret_mode_state()
    yield
    reset_gpu_interpret_mode_state()


# Tiles within one unit, over two, and within the first of two warpgroups; stages of one unit of K and of two.
@pytest.mark.parametrize(
    ("sizes", "activation", "tuning"),
    [
        ([9, 0, 7, 1], None, DenseTuning((8, 16), 2, 1, 96, 1, 3, 1)),
        ([9, 0, 7, 1], Situ(4.0, 25.0), DenseTuning((16,), 1, 2, 96, 2, 2, 2)),
        ([20], None, DenseTuning((8,), 1, 1, 48, 2, 2, 2)),
        ([20], SwiGLU(), DenseTuning((24,), 2, 1, 32, 1, 4, 1)),
    ],
    ids=str,
)
def test_the_kernel_multiplies_without_a_race(
    sizes: list[int], activation: Activation | None, tuning: DenseTuning
) -> None:
    """Rows beyond the groups' are NaN."""
    rng = np.random.default_rng(sum(sizes))
    used = sum(sizes)
    w = jnp.array(rng.standard_normal((len(sizes), N, K)) * K**-0.5, jnp.bfloat16)
    x = jnp.array(rng.standard_normal((ROWS, K)), jnp.bfloat16).at[used:].set(jnp.nan)
    how: Any = {"tuning": tuning, "multiprocessors": 2, "interpret": plgpu.InterpretGPUParams(detect_races=True)}
    y = grouped_matmul(x, w, jnp.array(sizes, jnp.int32), activation=activation, out_format="f32", **how)
    expected = grouped_product(as_float64(x[:used]), as_float64(w), np.array(sizes), activation)
    if activation is None:
        assert relative_l2(y[:used], expected) < 1e-6
    assert_close(y[:used], expected, KERNEL_TOLERANCES["bf16"])
    assert not get_races().races_found


def test_an_addend_joins_the_rounded_product_to_the_bit_without_a_race() -> None:
    """Of whole numbers, whose sums are exact; in tiles that neither their rows nor their columns fill."""
    rng = np.random.default_rng(0)
    numbers = [rng.integers(-20, 21, shape).astype(float) for shape in ((9, 64), (1, 48, 64), (9, 48))]
    x, w, addend = (jnp.array(each, jnp.bfloat16) for each in numbers)
    how: Any = {"tuning": DenseTuning((8,), 1, 1, 48, 1, 2, 1), "multiprocessors": 1, "activation": None}
    how["interpret"] = plgpu.InterpretGPUParams(detect_races=True)
    y = grouped_matmul(x, w, jnp.array([9], jnp.int32), addend=addend, **how)
    sums = numbers[0] @ numbers[1][0].T
    expected = round_bf16(round_bf16(sums) + numbers[2])
    assert (expected != round_bf16(sums + numbers[2])).any()
    np.testing.assert_array_equal(as_float64(y), expected)
    assert not get_races().races_found


@pytest.mark.parametrize("k_units", [1, 2, 4])
def test_sums_start_from_zero_every_1024_columns(k_units: int) -> None:
    """Ones that follow a large number 64 columns apart are lost in its sum, one by one, but not in one of their own."""
    tuning = DenseTuning((8,), 1, 1, 64, k_units, 2, 1)
    x, w = np.zeros((8, 2048), np.float32), np.zeros((1, 64, 2048), np.float32)
    x[:, 0], w[:, :, 0] = 2.0**12, 2.0**12
    ones = [768, 832, 896, 960, 1024, 1088, 1152]
    x[:, ones], w[:, :, ones] = 1, 1
    how: Any = {"tuning": tuning, "multiprocessors": 1, "interpret": plgpu.InterpretGPUParams(detect_races=True)}
    operands = jnp.array(x, jnp.bfloat16), jnp.array(w, jnp.bfloat16), jnp.array([8], jnp.int32)
    y = grouped_matmul(*operands, activation=None, out_format="f32", **how)
    np.testing.assert_array_equal(y, 2.0**24 + 4)  # of 2**24 + 3, rounded once
    assert not get_races().races_found
