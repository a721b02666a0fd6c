"""What loading does for a Hopper GPU, on a CPU that claims to be one: real layouts, and a stand-in for the kernel."""

import dataclasses
import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layers import random_arrays, random_tokens, small_config
from numerics import assert_same_bits, relative_l2

from k3jax import LoadOptions, MoE
from pallas_kernels import (
    KernelWeights,
    MXFP4Array,
    explain,
    from_kernel_layout,
    grouped_matmul,
    lay_out,
    quantize_fp8_token,
    quantize_mxfp8,
)

CONFIG = small_config(hidden_size=256, routed_expert_hidden_size=256, moe_intermediate_size=128)
pytestmark = pytest.mark.usefixtures("quickly_compiled")
PACKED = ("w4a16", "w4a8", "w4a8_fp8")


def experts(groups: int = 4, n: int = 256, k: int = 256) -> MXFP4Array:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (groups, n, k // 2), dtype=np.uint8)
    return MXFP4Array(jnp.asarray(codes), jnp.asarray(rng.integers(118, 124, (groups, n, k // 32), dtype=np.uint8)))


def with_wide_exponents(w: MXFP4Array) -> MXFP4Array:
    """Expert 3 spans scale bytes 0 to 183: more than the kernel holds."""
    return MXFP4Array(w.codes, (w.scales + 60).at[3, ..., 5, 1].set(0))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("recipe", "mma"), [("w4a16", "bf16"), ("w4a8", "bf16"), ("w4a8_fp8", "e4m3")])
def test_each_recipe_has_its_products_and_nothing_is_lost(recipe: str, mma: str) -> None:
    w = experts()
    laid_out = lay_out(w, recipe=recipe, gated=True)
    assert isinstance(laid_out, KernelWeights)
    assert (laid_out.mma, laid_out.gated) == (mma, True)
    back = from_kernel_layout(laid_out)
    assert_same_bits(back.codes, w.codes)
    assert_same_bits(back.scales, w.scales)
    assert explain("grouped_matmul", w=laid_out).chosen == "mosaic"
    with pytest.raises(NotImplementedError, match="laid out for a GPU's kernels"):
        explain("grouped_matmul", w=laid_out, implementation="xla")


@pytest.mark.usefixtures("hopper")
def test_weights_beyond_e4m3_products_are_multiplied_as_bfloat16(caplog: pytest.LogCaptureFixture) -> None:
    """An expert over 13 scale bytes, and a K of 64 columns more than e4m3 products can cut."""
    w = experts()
    for beyond, reason in ((MXFP4Array(w.codes, w.scales.at[2, 0, 0].set(111)), "expert 2"), (experts(k=192), "K=192")):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="pallas_kernels"):
            laid_out = lay_out(beyond, recipe="w4a8_fp8", gated=False, implementation="mosaic")
        assert isinstance(laid_out, KernelWeights)
        assert laid_out.mma == "bf16"
        assert reason in caplog.text
        assert_same_bits(from_kernel_layout(laid_out).scales, beyond.scales)


@pytest.mark.usefixtures("hopper")
def test_what_is_left_as_it_is() -> None:
    w, plain = experts(), jnp.ones((2, 256, 256), jnp.bfloat16)
    assert lay_out(w, recipe="w4a16", gated=False, implementation="xla") is w
    assert lay_out(plain, recipe="bf16", gated=False) is plain
    laid_out = lay_out(w, recipe="w4a16", gated=False)
    assert lay_out(laid_out, recipe="w4a16", gated=False) is laid_out
    assert lay_out(plain, recipe="bf16", gated=False, implementation="mosaic") is plain


def test_a_device_that_is_no_hopper() -> None:
    w = experts()
    assert lay_out(w, recipe="w4a16", gated=False) is w
    with pytest.raises(NotImplementedError, match=r"written for compute capability 9.0 or 10.0, and this is"):
        lay_out(w, recipe="w4a16", gated=False, implementation="mosaic")
    with pytest.raises(NotImplementedError, match=r"written for compute capability 9.0 or 10.0, and this is"):
        lay_out(jnp.ones((2, 256, 256), jnp.bfloat16), recipe="bf16", gated=False, implementation="mosaic")


@pytest.mark.usefixtures("hopper")
def test_shapes_and_exponents_that_the_kernel_cannot_hold(caplog: pytest.LogCaptureFixture) -> None:
    for w, reason in (
        (experts(n=96), "N=96"),
        (experts(n=64, k=64), "N=64 and K=64"),
        (with_wide_exponents(experts()), "expert 3"),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="pallas_kernels"):
            assert lay_out(w, recipe="w4a16", gated=False) is w
        assert reason in caplog.text
        with pytest.raises(NotImplementedError, match=reason):
            lay_out(w, recipe="w4a16", gated=False, implementation="mosaic")


@pytest.mark.usefixtures("hopper")
def test_a_loss_that_was_allowed_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="pallas_kernels"):
        exact = lay_out(experts(), recipe="w4a16", gated=False, allow_inexact=True)
        assert not caplog.text
        rounded = lay_out(with_wide_exponents(experts()), recipe="w4a16", gated=False, allow_inexact=True)
    assert "1 of 4 experts" in caplog.text
    assert "the worst, expert 3" in caplog.text
    assert isinstance(exact, KernelWeights)
    assert_same_bits(from_kernel_layout(exact).scales, experts().scales)
    assert isinstance(rounded, KernelWeights)
    assert int(from_kernel_layout(rounded).scales[3].min()) > 0


@pytest.mark.usefixtures("hopper")
def test_results_of_bfloat16_weights_are_quantised_after_the_kernel() -> None:
    w, sizes = jnp.ones((1, 64, 64), jnp.bfloat16), jnp.array([8], jnp.int32)
    x = random_tokens((8, 64))
    product: Any = functools.partial(grouped_matmul, x, w, sizes, implementation="mosaic")
    y = product()
    for out_format, quantize in (("mxfp8", quantize_mxfp8), ("fp8_token", quantize_fp8_token)):
        ours, expected = product(out_format=out_format), quantize(y, implementation="reference")
        assert_same_bits(ours.values, expected.values)
        assert_same_bits(ours.scales, expected.scales)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("recipe", PACKED)
def test_a_layer_of_laid_out_experts_computes_and_differentiates(recipe: str) -> None:
    arrays = random_arrays(CONFIG, recipe)
    mosaic, xla = (MoE(CONFIG, recipe=recipe, implementation=name, arrays=arrays) for name in ("mosaic", "xla"))
    assert isinstance(mosaic.w13.get_value(), KernelWeights)
    assert isinstance(xla.w13.get_value(), MXFP4Array)
    x = random_tokens((12, 256), dtype="float32")
    value_and_gradient = jax.jit(jax.value_and_grad(lambda x, layer: jnp.sum(layer(x) ** 2)))
    (ours, our_gradient), (theirs, their_gradient) = (value_and_gradient(x, layer) for layer in (mosaic, xla))
    assert abs(float(ours) - float(theirs)) < 1e-3 * abs(float(theirs))
    assert relative_l2(our_gradient, their_gradient) < 2e-2  # bfloat16 cotangents
    gate, up = (jnp.linspace(-reach, reach, 40).astype(jnp.bfloat16) for reach in (8, 50))
    assert_same_bits(mosaic.activation_probe(gate, up), xla.activation_probe(gate, up))


@pytest.mark.usefixtures("hopper")
def test_a_layer_whose_experts_do_not_fit_says_so_when_it_is_built() -> None:
    arrays = random_arrays(CONFIG, "w4a16")
    assert isinstance(arrays.w13, MXFP4Array)
    wide = dataclasses.replace(arrays, w13=with_wide_exponents(arrays.w13))
    with pytest.raises(NotImplementedError, match="expert 3"):
        MoE(CONFIG, recipe="w4a16", implementation="mosaic", arrays=wide)
    assert isinstance(MoE(CONFIG, recipe="w4a16", arrays=wide).w13.get_value(), MXFP4Array)
    assert isinstance(
        MoE(CONFIG, recipe="w4a16", options=LoadOptions(allow_inexact=True), arrays=wide).w13.get_value(), KernelWeights
    )
