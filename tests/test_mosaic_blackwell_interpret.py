"""The Blackwell kernel's roles, rings, barriers, tensor memory and schedule in Mosaic's interpreter, races detected.

Only copies, decode and store are plain operations there. Groups differ at run time only, so that each kernel here is
compiled once.
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
from numerics import KERNEL_TOLERANCES, assert_close, assert_same_bits

from pallas_kernels import Activation, MXFP4Array, Situ, SwiGLU
from pallas_kernels import grouped_matmul as public_grouped_matmul
from pallas_kernels.grouped_matmul.blackwell.config import BlackwellTuning
from pallas_kernels.grouped_matmul.blackwell.plain import PlainSteps
from pallas_kernels.grouped_matmul.kernel_layout import to_kernel_layout
from pallas_kernels.grouped_matmul.mosaic_blackwell import grouped_matmul

ROWS = 40
ONE_OF_EACH = BlackwellTuning(widest=16, slabs=1, decoders=1, k_units=1, stages=2)
KERNELS: dict[str, tuple[Activation | None, str, BlackwellTuning, int, int]] = {  # with N and K
    "one slab": (None, "f32", ONE_OF_EACH, 128, 64),
    "two slabs, decoders in turn": (Situ(4.0, 25.0), "bf16", BlackwellTuning(48, 2, 4, 1, 2), 256, 192),
    "two units of K": (SwiGLU(), "mxfp8", BlackwellTuning(16, 1, 2, 2, 2), 256, 128),
}
SIZES = {
    "one slab": [[0, 0, 0, 0], [0, 40, 0, 0], [7, 8, 9, 16]],
    "two slabs, decoders in turn": [[33, 0, 6, 1]],
    "two units of K": [[9, 0, 17, 1]],
}


@pytest.fixture(autouse=True)
def _clean_interpreter() -> Iterator[None]:
    reset_gpu_interpret_mode_state()
    yield
    reset_gpu_interpret_mode_state()


STATIC = ("activation", "out_format", "tuning", "multiprocessors", "interpret")
compiled = jax.jit(grouped_matmul, static_argnames=STATIC)


def run(kernel: str, sizes: list[int], blocks: int = 1, multiply: Any = compiled) -> tuple[Any, Any]:
    """(the kernel's rows, the reference's rows) that belong to a group, on random operands with a NaN tail."""
    activation, out_format, tuning, n, k = KERNELS[kernel]
    rng = np.random.default_rng(sum(sizes))
    codes = rng.integers(0, 256, (len(sizes), n, k // 2), dtype=np.uint8)
    w = MXFP4Array(jnp.array(codes), jnp.array(rng.integers(118, 124, (len(sizes), n, k // 32), dtype=np.uint8)))
    used = sum(sizes)
    x = jnp.array(rng.standard_normal((ROWS, k)), jnp.bfloat16).at[used:].set(jnp.nan)
    group_sizes = jnp.array(sizes, jnp.int32)
    result = multiply(
        x,
        to_kernel_layout(w, recipe="w4a16", gated=activation is not None),
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


@pytest.mark.parametrize(("kernel", "sizes"), [(name, each) for name, all_ in SIZES.items() for each in all_], ids=str)
def test_every_row_of_every_group_equals_the_reference_without_a_race(kernel: str, sizes: list[int]) -> None:
    # One block has every tile, so that it uses each place of its rings again; two share them.
    result, expected = run(kernel, sizes, blocks=2 if kernel == "two units of K" else 1)
    assert not get_races().races_found
    if KERNELS[kernel][1] == "mxfp8":
        assert_same_bits(result.scales, expected.scales)
        assert_same_bits(result.values, expected.values)
    elif sum(sizes):
        assert_close(result, expected, KERNEL_TOLERANCES["w4a16"])


def test_the_detector_sees_an_operand_read_before_it_was_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: without it, the tests above could pass for want of a detector."""
    monkeypatch.setattr(PlainSteps, "await_full", lambda self, ring: None)
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # that no thread waited is an error of its own, at the end
        run("one slab", [16, 0, 0, 0], multiply=grouped_matmul)
    assert get_races().races_found
