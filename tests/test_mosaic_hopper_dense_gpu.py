"""`mosaic`'s products of bfloat16 weights on a Hopper GPU, against float64: at the sizes of the shared experts, over
groups and over tunings; and `dense_matmul`, at those of a layer. Run with `pytest -m gpu` where JAX sees one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gemm_truth import grouped_product
from numerics import KERNEL_TOLERANCES, as_float64, assert_close, assert_same_bits, relative_l2, round_bf16
from test_mosaic_hopper_gpu import SIZES, random_rows

from k3jax import GatedMLP
from k3jax.compare.tolerances import limits
from pallas_kernels import (
    Activation,
    Situ,
    SwiGLU,
    dense_matmul,
    explain,
    quantize_fp8_block,
    quantize_fp8_token,
    quantize_mxfp8,
)
from pallas_kernels import grouped_matmul as public_grouped_matmul
from pallas_kernels.grouped_matmul.hopper.dense_config import DenseTuning
from pallas_kernels.grouped_matmul.mosaic_hopper_dense import grouped_matmul

pytestmark = pytest.mark.gpu
KIMI = Situ(4.0, 25.0)
ACTIVATIONS = (None, KIMI, SwiGLU())
TUNINGS = (  # of N 480, or 240 columns of gate and up each
    None,
    DenseTuning((8, 32, 64), 1, 2, 80, 1, 5, 2),
    DenseTuning((24,), 2, 1, 96, 2, 3, 1),
    DenseTuning((184,), 3, 1, 160, 1, 3, 12),
    DenseTuning((256,), 2, 1, 96, 1, 3, 1),
    DenseTuning((40, 152), 2, 2, 240, 1, 3, 3),
)
kernel = jax.jit(grouped_matmul, static_argnames=("activation", "tuning", "out_format"))
named = functools.partial(public_grouped_matmul, implementation="mosaic")


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random_weights(key: jax.Array, groups: int, n: int, k: int) -> jax.Array:
    return (jax.random.normal(key, (groups, n, k)) * k**-0.5).astype(jnp.bfloat16)


def check(y: jax.Array, x: jax.Array, w: np.ndarray, sizes: np.ndarray, activation: Activation | None) -> None:
    """Compares the groups' rows with float64; a float32 result more strictly."""
    used = int(sizes.sum())
    expected = grouped_product(as_float64(x[:used]), w, sizes, activation)
    if y.dtype != jnp.float32:
        expected = round_bf16(expected)
    elif activation is None:  # the products are exact, and nothing is rounded but their sums
        assert relative_l2(y[:used], expected) < 1e-5
    assert_close(np.asarray(y[:used]), expected, KERNEL_TOLERANCES["bf16"])


@functools.lru_cache(maxsize=1)
def shared_experts() -> tuple[jax.Array, np.ndarray]:
    w = random_weights(jax.random.key(0), 1, 12288, 7168)
    return w, as_float64(w)


@functools.lru_cache(maxsize=1)
def dense_weights(n: int, k: int) -> tuple[jax.Array, np.ndarray]:
    w = random_weights(jax.random.key(4), 1, n, k)
    return w[0], as_float64(w)


@pytest.mark.parametrize("rows", [1, 3, 8, 33, 256, 1024])
@pytest.mark.parametrize(
    ("n", "k"), [(7168, 6144), (3584, 7168), (7168, 3584)], ids=["down", "latent down", "latent up"]
)
def test_the_layer_s_other_products_are_the_kernel_s_by_default(n: int, k: int, rows: int) -> None:
    w, truth = dense_weights(n, k)
    x: Any = random_rows(rows, k, rows, "bf16")
    assert explain("dense_matmul", x=x, w=w).chosen == "mosaic"
    some = np.arange(0, rows, max(1, rows // 50))
    sizes = np.array([some.size])
    for out_format in ("bf16", "f32"):
        y = dense_matmul(x, w, out_format=out_format)
        assert y.shape == (rows, n)
        check(y[some], x[some], truth, sizes, None)
    fine = dense_matmul(x, w, out_format="f32", fine_sums=True)
    assert relative_l2(fine[some], grouped_product(as_float64(x[some]), truth, sizes, None)) < 5e-6


@pytest.mark.parametrize("rows", [1, 8, 64, 1024])
def test_an_addend_joins_the_rounded_product_to_the_bit(rows: int) -> None:
    """And nothing of what lies beyond its rows."""
    w, _ = dense_weights(7168, 3584)
    x: Any = random_rows(rows, 3584, rows, "bf16")
    addend = jax.random.normal(jax.random.key(rows), (rows, 7168)).astype(jnp.bfloat16)
    y = dense_matmul(x, w).astype(jnp.float32) + addend.astype(jnp.float32)
    assert_same_bits(dense_matmul(x, w, addend=addend), y.astype(jnp.bfloat16))


@pytest.mark.parametrize("rows", [1, 5, 100])
def test_a_dense_layer_by_the_kernel_and_by_xla(rows: int) -> None:
    """Alone, and with fp8 weights."""
    gate_up = random_weights(jax.random.key(5), 2, 1536, 1024)
    down = random_weights(jax.random.key(6), 1, 1024, 1536)[0]
    x: Any = random_rows(rows, 1024, rows, "bf16")
    by_xla = functools.partial(dense_matmul, implementation="xla")
    for weights in ((gate_up, down), (quantize_fp8_block(gate_up), quantize_fp8_block(down))):
        y = jax.jit(lambda layer, x: layer(x))(GatedMLP(*weights, activation=KIMI), x)
        expected = by_xla(by_xla(x, weights[0], activation=KIMI), weights[1])
        assert explain("dense_matmul", x=x, w=weights[0], activation=KIMI).chosen == "mosaic"
        assert relative_l2(y, expected) < limits("oracle", "bf16").relative_l2


@pytest.mark.parametrize("activation", [None, KIMI], ids=str)
def test_gradients_and_vmap_around_the_kernel(activation: Activation | None) -> None:
    w = random_weights(jax.random.key(7), 3, 512, 768)
    x: Any = random_rows(60, 768, 60, "bf16")
    weight = jax.random.normal(jax.random.key(8), (60, 1))
    product = functools.partial(dense_matmul, activation=activation)

    @functools.partial(jax.jit, static_argnums=2)
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradient(x: Any, w: Any, implementation: str) -> Any:
        return jnp.sum(product(x, w, implementation=implementation).astype(jnp.float32) * weight)

    for ours, theirs in zip(gradient(x, w[0], "mosaic"), gradient(x, w[0], "xla"), strict=True):
        assert relative_l2(ours, theirs) < 1e-3
    flat = product(x, w[0])
    batched = jax.jit(jax.vmap(product, in_axes=(0, None)))(x.reshape(4, 15, 768), w[0])
    assert_same_bits(batched.reshape(flat.shape), flat)
    for y, one in zip(jax.jit(jax.vmap(product, in_axes=(None, 0)))(x, w), w, strict=True):
        assert_same_bits(y, product(x, one))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 8, 64, 200, 1024])
def test_the_sizes_of_the_shared_experts(rows: int, activation: Activation | None) -> None:
    w, truth = shared_experts()
    x = random_rows(rows, 7168, rows, "bf16")
    assert isinstance(x, jax.Array)
    y = named(x, w, jnp.array([rows], jnp.int32), activation=activation)
    some = np.arange(0, rows, max(1, rows // 100))  # float64 takes its time
    check(y[some], x[some], truth, np.array([some.size]), activation)


@pytest.mark.parametrize("out_format", ["bf16", "f32"])
@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_every_size_of_a_group(activation: Activation | None, tuning: DenseTuning | None, out_format: Any) -> None:
    for sizes in (np.array(SIZES), np.array(SIZES)[::-1]):
        w = random_weights(jax.random.key(1), sizes.size, 480, 768)
        x: Any = random_rows(900, 768, int(sizes.sum()), "bf16")
        y = kernel(x, w, jnp.asarray(sizes), activation=activation, tuning=tuning, out_format=out_format)
        check(y, x, as_float64(w), sizes, activation)


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
@pytest.mark.parametrize("used", [0, 1, 100, 333])
def test_a_single_group_of_some_of_the_rows(used: int, tuning: DenseTuning | None) -> None:
    w = random_weights(jax.random.key(2), 1, 480, 768)
    x: Any = random_rows(333, 768, used, "bf16")
    y = kernel(x, w, jnp.array([used]), activation=KIMI, tuning=tuning)
    check(y, x, as_float64(w), np.array([used]), KIMI)


def test_quantised_results_are_those_of_the_rounded_ones() -> None:
    sizes = jnp.array([40, 0, 24], jnp.int32)
    w = random_weights(jax.random.key(3), 3, 512, 768)
    x: Any = random_rows(64, 768, 64, "bf16")
    y = named(x, w, sizes, activation=KIMI)
    for out_format, quantize in (("mxfp8", quantize_mxfp8), ("fp8_token", quantize_fp8_token)):
        q: Any = named(x, w, sizes, activation=KIMI, out_format=out_format)
        expected = quantize(y, implementation="reference")
        assert_same_bits(q.values, expected.values)
        assert_same_bits(q.scales, expected.scales)


@pytest.mark.parametrize("rows", [8, 600])
def test_500_repeats_are_equal_to_the_bit(rows: int) -> None:
    """A stage read late shows as a flicker."""
    w, _ = shared_experts()
    x, sizes = random_rows(rows, 7168, rows, "bf16"), jnp.array([rows], jnp.int32)
    first = kernel(x, w, sizes, activation=KIMI)
    same = jax.jit(lambda a, b: (a.view(jnp.uint16) == b.view(jnp.uint16)).all())
    assert bool(jnp.stack([same(kernel(x, w, sizes, activation=KIMI), first) for _ in range(500)]).all())
