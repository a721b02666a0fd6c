"""The Hopper kernel's roles, ring, barriers and schedule in Mosaic's interpreter, with the race detector on.

The decode is plain operations there; what the GPU alone can show is in test_mosaic_hopper_gpu.py.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import get_races, reset_gpu_interpret_mode_state
from jax.experimental.pallas import mosaic_gpu as plgpu
from numerics import KERNEL_TOLERANCES, assert_close, assert_same_bits, relative_l2

from pallas_kernels import Activation, MXFP4Array, Situ, SwiGLU, quantize_fp8_token, quantize_mxfp8
from pallas_kernels import grouped_matmul as public_grouped_matmul
from pallas_kernels.grouped_matmul.config import Tuning
from pallas_kernels.grouped_matmul.hopper.plain import PlainSteps
from pallas_kernels.grouped_matmul.kernel_layout import to_kernel_layout
from pallas_kernels.grouped_matmul.mosaic_hopper import grouped_matmul

QUANTIZERS = {"w4a8": quantize_mxfp8, "w4a8_fp8": quantize_fp8_token}
ROWS, N, K = 40, 128, 128

# Groups differ at run time only, so that equal shapes are compiled once.
STATIC = ("activation", "out_format", "tuning", "multiprocessors", "interpret")
compiled = jax.jit(grouped_matmul, static_argnames=STATIC)


@pytest.fixture(autouse=True)
def _clean_interpreter() -> Iterator[None]:
    reset_gpu_interpret_mode_state()
    yield
    reset_gpu_interpret_mode_state()


def run(
    sizes: list[int],
    tuning: Tuning,
    recipe: str = "w4a16",
    activation: Activation | None = None,
    blocks: int = 2,
    layout: str | None = None,
    out_format: Any = "bf16",
    k: int = K,
    multiply: Any = compiled,
) -> tuple[Any, Any]:
    """(the kernel's rows, the reference's rows) that belong to a group, on random operands with a NaN tail."""
    rng = np.random.default_rng(sum(sizes))
    codes = rng.integers(0, 256, (len(sizes), N, k // 2), dtype=np.uint8)
    w = MXFP4Array(jnp.array(codes), jnp.array(rng.integers(118, 124, (len(sizes), N, k // 32), dtype=np.uint8)))
    used = sum(sizes)
    rows = jnp.array(rng.standard_normal((ROWS, k)), jnp.bfloat16).at[used:].set(jnp.nan)
    x = QUANTIZERS.get(recipe, lambda rows: rows)(rows)
    group_sizes = jnp.array(sizes, jnp.int32)
    result = multiply(
        x,
        to_kernel_layout(w, recipe=layout or recipe, gated=activation is not None),
        group_sizes,
        activation=activation,
        out_format=out_format,
        tuning=tuning,
        multiprocessors=blocks,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    jax.block_until_ready(result)
    expected = public_grouped_matmul(
        x, w, group_sizes, activation=activation, out_format=out_format, implementation="reference"
    )
    return jax.tree.map(lambda leaf: leaf[:used], (result, expected))


@pytest.mark.parametrize(
    ("recipe", "activation", "tuning"),
    [
        ("w4a16", None, Tuning((8, 16), 2, 1, 2, 2)),
        ("w4a16", Situ(4.0, 25.0), Tuning((8, 24), 1, 2, 1, 3)),
        ("w4a16", SwiGLU(), Tuning((16,), 1, 1, 2, 2)),
        ("w4a8", Situ(1.0, None), Tuning((8,), 2, 1, 2, 2)),
        ("w4a8_fp8", None, Tuning((8, 16), 1, 2, 2, 2)),
    ],
)
def test_the_kernel_equals_the_reference_without_a_race(
    recipe: str, activation: Activation | None, tuning: Tuning
) -> None:
    result, expected = run([13, 0, 9, 1], tuning, recipe, activation)
    assert_close(result, expected, KERNEL_TOLERANCES[recipe])
    assert not get_races().races_found


def test_e4m3_products_over_stages_of_two_partial_sums_each() -> None:
    result, expected = run([9, 0, 1], Tuning((16,), 1, 2, 4, 2), "w4a8_fp8", Situ(4.0, 25.0), blocks=1, k=512)
    assert_close(result, expected, KERNEL_TOLERANCES["w4a8_fp8"])
    assert not get_races().races_found


@pytest.mark.parametrize("activation", [None, Situ(4.0, 25.0)])
def test_token_scaled_rows_multiply_exactly_in_the_bfloat16_layout(activation: Activation | None) -> None:
    result, expected = run([13, 0, 9, 1], Tuning((8, 16), 2, 1, 2, 2), "w4a8_fp8", activation, layout="w4a16")
    assert_close(result, expected, KERNEL_TOLERANCES["w4a16"])
    assert not get_races().races_found


@pytest.mark.parametrize("activation", [None, Situ(4.0, 25.0)])
def test_float32_results_are_not_rounded(activation: Activation | None) -> None:
    result, expected = run([5, 0, 3], Tuning((8,), 1, 2, 1, 2), "w4a8_fp8", activation, 1, "w4a16", "f32")
    assert result.dtype == jnp.float32
    # Before an activation gate and up are rounded, one step apart where the float32 sums differ.
    assert relative_l2(result, expected) < (1e-6 if activation is None else 2e-4)
    assert not get_races().races_found


@pytest.mark.parametrize("activation", [None, Situ(4.0, 25.0)])
def test_mxfp8_results_have_the_bits_of_rounding_first(activation: Activation | None) -> None:
    result, expected = run([5, 0, 3], Tuning((8,), 1, 2, 1, 2), "w4a8", activation, 1, out_format="mxfp8")
    assert_same_bits(result.scales, expected.scales)
    assert_same_bits(result.values, expected.values)
    assert not get_races().races_found


@pytest.mark.parametrize("sizes", [[0, 0, 0], [40, 0, 0], [0, 0, 40], [0, 17, 0], [8, 8, 8], [1, 1, 1]], ids=str)
def test_every_row_of_every_group_is_written_and_no_other_leaks(sizes: list[int]) -> None:
    result, expected = run(sizes, Tuning((8, 16), 2, 1, 2, 2))
    assert_same_bits(result, expected)
    assert not get_races().races_found


def test_launches_share_the_groups_out() -> None:
    """Groups of up to 8 rows are cheaper in the second; each launch leaves the rows of the other's alone."""
    tuning = Tuning((24,), 2, 1, 2, 2, (Tuning((8, 16), 1, 2, 1, 3, costs=(2, 4)),), (5,))
    result, expected = run([13, 0, 9, 1, 16], tuning)
    assert_same_bits(result, expected)
    assert not get_races().races_found


@pytest.mark.parametrize("blocks", [1, 3, 8])
def test_any_number_of_multiprocessors_gives_the_same_bits(blocks: int) -> None:
    result, expected = run([9, 20], Tuning((8, 16), 1, 1, 2, 2), blocks=blocks)
    assert_same_bits(result, expected)


def test_the_detector_sees_a_slot_read_before_it_was_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: without it, the tests above could pass for want of a detector."""
    monkeypatch.setattr(PlainSteps, "await_full", lambda self, ring: None)
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # that no thread waited is an error of its own, at the end
        run([16, 16], Tuning((16,), 1, 1, 2, 2), blocks=1, multiply=grouped_matmul)
    assert get_races().races_found
