"""The layer on a Hopper GPU: laid out for the kernel when it is built, the same numbers, the same gradient."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import KIMI, Case
from layers import checkpoint_tensors, random_arrays, random_tokens, small_config
from numerics import relative_l2
from test_grouped_matmul_gradient import check_input_gradient
from test_layer_gradient import check_layer_gradients

from k3jax import LoadOptions, MoE
from k3jax.compare.tolerances import limits
from k3jax.reference import oracle_trace
from pallas_kernels import Activation, KernelWeights, MXFP4Array, SwiGLU, explain

pytestmark = pytest.mark.gpu

CONFIG = small_config(hidden_size=256, routed_expert_hidden_size=256, moe_intermediate_size=128)
PACKED = ["w4a16", "w4a8", "w4a8_fp8"]
trace = jax.jit(lambda layer, x: layer.trace(x))
call = jax.jit(lambda layer, x, mask=None: layer(x, mask))


@pytest.mark.parametrize("tokens", [1, 7, 300])
@pytest.mark.parametrize("recipe", PACKED)
def test_every_stage_against_the_oracle(recipe: str, tokens: int) -> None:
    arrays = random_arrays(CONFIG, recipe)
    layer = MoE(CONFIG, recipe=recipe, arrays=arrays)
    assert isinstance(layer.w13.get_value(), KernelWeights)
    assert explain("grouped_matmul", w=layer.w13.get_value()).chosen == "mosaic"
    x = random_tokens((tokens, 256))
    stages = trace(layer, x)
    ids = np.asarray(stages["expert_ids"])
    truth = oracle_trace(CONFIG, checkpoint_tensors(arrays), np.asarray(x), recipe=recipe, ids=ids)
    allowed = limits("oracle", recipe)
    for stage in ("latent", "expert_sum", "normed_latent", "shared", "output"):
        assert relative_l2(stages[stage], truth[stage]) < allowed.relative_l2, stage


@pytest.mark.parametrize("tokens", [48, 1024])
@pytest.mark.parametrize("recipe", PACKED)
def test_the_real_widths_against_the_oracle(recipe: str, tokens: int) -> None:
    """Rounding rows to eight bits amplifies what a product is off by: sums in fewer bits than float32 show."""
    config = small_config(
        hidden_size=7168,
        routed_expert_hidden_size=3584,
        moe_intermediate_size=3072,
        num_experts=4,
        num_experts_per_token=2,
    )
    arrays = random_arrays(config, recipe)
    x = random_tokens((tokens, 7168))
    layer = MoE(config, recipe=recipe, arrays=arrays)
    w13 = layer.w13.get_value()
    assert isinstance(w13, KernelWeights)
    assert w13.mma == ("e4m3" if recipe == "w4a8_fp8" else "bf16")
    stages = trace(layer, x)
    ids = np.asarray(stages["expert_ids"])
    truth = oracle_trace(config, checkpoint_tensors(arrays), np.asarray(x), recipe=recipe, ids=ids)
    errors = {stage: relative_l2(stages[stage], truth[stage]) for stage in ("latent", "expert_sum", "output")}
    print(recipe, errors)
    allowed = limits("oracle", recipe).relative_l2
    assert all(error < allowed for error in errors.values()), errors  # the largest would not be one that is NaN


@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
@pytest.mark.parametrize(("recipe", "limit"), [("w4a16", 0.01), ("w4a8", 0.07), ("w4a8_fp8", 0.07)])
def test_every_gradient_is_the_formula_s(recipe: str, limit: float, implementation: str) -> None:
    """x and every array that trains, forward by the kernel and back by `xla`."""
    check_layer_gradients(CONFIG, recipe, implementation, limit)


@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
@pytest.mark.parametrize(("activation", "out_format"), [(None, "bf16"), (KIMI, "f32"), (SwiGLU(), "bf16")], ids=str)
def test_a_product_s_gradient_equals_float64(
    activation: Activation | None, out_format: str, implementation: str
) -> None:
    """dx of experts in the kernel's layout; `triton` also takes them as checkpoints have them."""
    case = Case("w4a16", 300, 5, 512, 768, "half of the rows", activation, out_format)
    check_input_gradient(case, implementation, laid_out=True)
    if implementation == "triton":
        check_input_gradient(case, implementation)


def test_masked_tokens_and_zero_tokens() -> None:
    layer = MoE(CONFIG, recipe="w4a8_fp8", arrays=random_arrays(CONFIG, "w4a8_fp8"))
    x = random_tokens((40, 256))
    mask = jnp.arange(40) % 3 != 0
    poisoned = jnp.where(mask[:, None], x, jnp.nan)
    assert relative_l2(call(layer, poisoned, mask)[mask], call(layer, x)[mask]) < 1e-3
    assert call(layer, x[:0]).shape == (0, 256)


def test_exponents_that_the_kernel_cannot_hold(caplog: pytest.LogCaptureFixture) -> None:
    arrays = random_arrays(CONFIG, "w4a16")
    w13 = arrays.w13
    assert isinstance(w13, MXFP4Array)
    # Gates and ups of 2^60 saturate SiTU; beside them, one block of expert 3 with the smallest scale there is.
    arrays = dataclasses.replace(arrays, w13=MXFP4Array(w13.codes, (w13.scales + 60).at[3, 0, 5, 1].set(0)))
    with pytest.raises(NotImplementedError, match="expert 3"):
        MoE(CONFIG, recipe="w4a16", implementation="mosaic", arrays=arrays)
    passed_over = MoE(CONFIG, recipe="w4a16", arrays=arrays)
    assert isinstance(passed_over.w13.get_value(), MXFP4Array)
    with caplog.at_level(logging.WARNING, logger="pallas_kernels"):
        rounded = MoE(
            CONFIG, recipe="w4a16", implementation="mosaic", options=LoadOptions(allow_inexact=True), arrays=arrays
        )
    assert "the worst, expert 3" in caplog.text
    x = random_tokens((64, 256))
    assert relative_l2(call(rounded, x), call(passed_over, x)) < limits("oracle", "w4a16").relative_l2
