"""The Blackwell kernel on a Blackwell GPU, which no one has run it on yet. `pytest -m gpu` where JAX sees one."""

import jax
import jax.numpy as jnp
import pytest
from numerics import KERNEL_TOLERANCES, assert_close

from pallas_kernels import Activation, MXFP4Array, Situ, SwiGLU, triton_call
from pallas_kernels import grouped_matmul as public_grouped_matmul
from pallas_kernels.grouped_matmul.blackwell.config import BlackwellTuning
from pallas_kernels.grouped_matmul.kernel_layout import to_kernel_layout
from pallas_kernels.grouped_matmul.mosaic_blackwell import grouped_matmul

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(triton_call.capability() != 100, reason="needs a GPU of compute capability 10.0"),
]
KIMI = Situ(4.0, 25.0)
SIZES = (0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 257)
TUNINGS = (
    None,
    BlackwellTuning(16, 1, 1, 1, 2),
    BlackwellTuning(48, 2, 4, 2, 4),
    BlackwellTuning(96, 1, 4, 1, 8),
    BlackwellTuning(160, 2, 2, 1, 4),
    BlackwellTuning(256, 1, 2, 1, 2),
)
kernel = jax.jit(grouped_matmul, static_argnames=("activation", "tuning", "out_format"))


def check(
    sizes: tuple[int, ...], n: int, k: int, activation: Activation | None, tuning: BlackwellTuning | None
) -> None:
    """The kernel's rows against `xla`'s, with a NaN tail."""
    keys, used = jax.random.split(jax.random.key(n + k), 3), sum(sizes)
    codes = jax.random.bits(keys[0], (len(sizes), n, k // 2), jnp.uint8)
    w = MXFP4Array(codes, jax.random.randint(keys[1], (len(sizes), n, k // 32), 118, 124).astype(jnp.uint8))
    x = jax.random.normal(keys[2], (used + 40, k), jnp.bfloat16).at[used:].set(jnp.nan)
    group_sizes = jnp.array(sizes, jnp.int32)
    laid_out = to_kernel_layout(w, recipe="w4a16", gated=activation is not None)
    y = kernel(x, laid_out, group_sizes, activation=activation, tuning=tuning)
    expected = public_grouped_matmul(x, w, group_sizes, activation=activation, implementation="xla")
    assert_close(y[:used], expected[:used], KERNEL_TOLERANCES["w4a16"])


@pytest.mark.parametrize("activation", [None, KIMI, Situ(1.0, None), SwiGLU()], ids=str)
def test_every_size_of_a_group(activation: Activation | None) -> None:
    check(SIZES, 512, 768, activation, None)


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
def test_every_kind_of_tuning(tuning: BlackwellTuning | None) -> None:
    check(SIZES, 512, 768, KIMI, tuning)


@pytest.mark.parametrize("rows", [1, 18, 146])
@pytest.mark.parametrize(("n", "k", "activation"), [(6144, 3584, KIMI), (3584, 3072, None)], ids=["w13", "w2"])
def test_the_model_s_sizes(n: int, k: int, activation: Activation | None, rows: int) -> None:
    check((rows,) * 16, n, k, activation, None)
