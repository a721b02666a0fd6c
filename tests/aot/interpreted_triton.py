"""The Triton kernels themselves, run by Triton's interpreter: `test_triton_interpret.py` starts a process for them."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Case, make_operands
from layers import random_arrays, random_tokens, small_config
from numerics import KERNEL_TOLERANCES, Tolerance, as_float64, assert_close, assert_same_bits

from k3jax import MoE
from pallas_kernels import (
    KernelWeights,
    MXFP4Array,
    Situ,
    SwiGLU,
    combine_rows,
    explain,
    gather_rows,
    grouped_matmul,
    quantize_fp8_token,
    quantize_mxfp8,
    schedule_rows,
    situ_and_mul,
    stable_top_k,
    swiglu_and_mul,
    to_kernel_layout,
)
from pallas_kernels.grouped_matmul import reference, triton_gemm
from pallas_kernels.grouped_matmul.triton.tuning import PlainTuning, WordsTuning

KIMI = Situ(4.0, 25.0)
SMALL = [case for case in CASES if case.depth < 2048]
WORDS = [case for case in SMALL if case.recipe != "bf16" and case.width % 64 == case.depth % 64 == 0]
LARGE = [case for case in CASES if case.depth >= 2048]


def check(case: Case, target: int, *, laid_out: bool, tuning: WordsTuning | PlainTuning | None = None) -> None:
    """One product against the reference, in the rows that a group has."""
    o = make_operands(case)
    used = int(o.group_sizes.sum())
    sizes = jnp.asarray(o.group_sizes)
    dtype = jnp.dtype(jnp.float32 if case.out_format == "f32" else jnp.bfloat16)
    w = to_kernel_layout(o.w, recipe="w4a16", gated=case.activation is not None) if laid_out else o.w
    y = triton_gemm.grouped_matmul(o.x, w, sizes, activation=case.activation, dtype=dtype, tuning=tuning, target=target)
    expected = reference.forward(o.x, o.w, sizes, case.activation, dtype)
    assert_close(y[:used], expected[:used], KERNEL_TOLERANCES[case.recipe])


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_weights_as_they_are_for_blackwell(case: Case) -> None:
    check(case, 100, laid_out=False)


@pytest.mark.parametrize("case", [case for case in SMALL if case.recipe == "w4a8"], ids=str)
def test_weights_as_they_are_for_ampere(case: Case) -> None:
    check(case, 80, laid_out=False)


@pytest.mark.parametrize(("case", "target"), [(case, (80, 90)[i % 2]) for i, case in enumerate(WORDS)], ids=str)
def test_weights_laid_out(case: Case, target: int) -> None:
    check(case, target, laid_out=True)


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_several_column_blocks(case: Case) -> None:
    check(dataclasses.replace(case, depth=256, width=512), 90, laid_out=True)
    check(dataclasses.replace(case, depth=256, width=512), 100, laid_out=False)


@pytest.mark.parametrize(
    "tuning",
    [WordsTuning(1, 1, 16, 0, 4, 2), WordsTuning(2, 1, 16, 32, 4, 2), WordsTuning(1, 2, 64, 16, 4, 2)],
    ids=str,
)
def test_every_kind_of_tuning(tuning: WordsTuning) -> None:
    case = Case("w4a16", 150, 3, 128, 128, "skewed", KIMI)
    check(case, 90, laid_out=True, tuning=tuning)


def test_every_pattern_of_empty_groups() -> None:
    case = Case("w4a16", 40, 3, 64, 64, activation=KIMI)
    o = make_operands(case)
    laid_out = to_kernel_layout(o.w, recipe="w4a16", gated=True)
    rows = jnp.asarray(np.random.default_rng(0).standard_normal((40, 64), np.float32)).astype(jnp.bfloat16)
    for pattern in itertools.product((0, 1), repeat=3):
        sizes = jnp.asarray(np.array([3, 17, 20], np.int32) * np.array(pattern, np.int32))
        used = int(sizes.sum())
        x = rows.at[used:].set(jnp.nan)
        expected = reference.forward(x, o.w, sizes, KIMI, jnp.dtype(jnp.bfloat16))[:used]
        for w in (laid_out, o.w):
            y = triton_gemm.grouped_matmul(x, w, sizes, activation=KIMI, dtype=jnp.dtype(jnp.bfloat16))
            assert_close(y[:used], expected, KERNEL_TOLERANCES["w4a16"])


@pytest.mark.parametrize("activation", [KIMI, Situ(1.0, None), SwiGLU()], ids=str)
def test_poison_stays_visible(activation: Any) -> None:
    """A NaN in a row, or a scale byte of 255, makes NaN of what it touches and of nothing else."""
    o = make_operands(Case("w4a16", 4, 1, 64, 64, "balanced", activation))
    x = o.x.at[1, 5].set(jnp.nan)
    w = MXFP4Array(o.w.codes, o.w.scales.at[0, 7, 1].set(255))
    y = triton_gemm.grouped_matmul(
        x, w, jnp.asarray([4]), activation=activation, dtype=jnp.dtype(jnp.float32), target=100
    )
    bad = np.isnan(as_float64(y))
    assert bad[1].all()
    assert bad[:, 7].all()
    assert bad.sum() == 32 + 3


@pytest.mark.parametrize("low", [0, 200])
def test_scale_bytes_far_from_one(low: int) -> None:
    o = make_operands(Case("w4a16", 16, 2, 64, 64, "balanced"))
    near = jnp.asarray(np.random.default_rng(0).integers(low, low + 12, o.w.scales.shape, np.uint8))
    w = MXFP4Array(o.w.codes, near.at[1].set(o.w.scales[1]))
    sizes = jnp.asarray(o.group_sizes)
    expected = reference.forward(o.x, w, sizes, None, jnp.dtype(jnp.float32))
    laid_out = to_kernel_layout(w, recipe="w4a16", gated=False)
    y = triton_gemm.grouped_matmul(o.x, laid_out, sizes, activation=None, dtype=jnp.dtype(jnp.float32))
    for rows in (slice(0, 8), slice(8, 16)):
        assert_close(y[rows], expected[rows], KERNEL_TOLERANCES["w4a16"])


def test_the_public_product_its_formats_and_its_gradient() -> None:
    case = Case("w4a16", 24, 3, 128, 64, activation=KIMI)
    o = make_operands(case)
    sizes = jnp.asarray(o.group_sizes)

    def product(x: jax.Array, w: Any, implementation: str, out_format: str = "bf16") -> Any:
        return grouped_matmul(x, w, sizes, activation=KIMI, out_format=out_format, implementation=implementation)

    for out_format in ("mxfp8", "fp8_token"):
        ours, theirs = (product(o.x, o.w, name, out_format) for name in ("triton", "reference"))
        assert_close(ours.dequantize(), theirs.dequantize(), Tolerance(6e-3))
    assert product(o.x, o.w, "triton", "f32").dtype == jnp.float32
    mine, other = (
        jax.grad(lambda x, name=name: product(x, o.w, name).astype(jnp.float32).sum())(o.x)
        for name in ("triton", "reference")
    )
    assert_close(mine, other, KERNEL_TOLERANCES["w4a16"])
    laid_out = to_kernel_layout(o.w, recipe="w4a16", gated=True)
    batch = jax.vmap(lambda x: product(x, laid_out, "triton"))(jnp.stack([o.x, -o.x]))
    assert_same_bits(batch[0], product(o.x, laid_out, "triton"))
    with pytest.raises(NotImplementedError, match="gated=True do not fit activation=None"):
        grouped_matmul(o.x, laid_out, sizes, implementation="triton")


def odd_rows(dtype: Any) -> jax.Array:
    """Rows of all magnitudes, subnormals, every tie's neighbourhood, zeros, infinities and NaNs."""
    rng = np.random.default_rng(1)
    with np.errstate(over="ignore"):
        rows = np.ldexp(rng.standard_normal((40, 96)), rng.integers(-150, 120, (40, 1))).astype(np.float32)
    bits = rng.integers(0, 2**32, (8, 96), dtype=np.uint32).view(np.float32)
    ties = (np.arange(96, dtype=np.float32) * 0.5 + 400)[None]
    special = np.zeros((4, 96), np.float32)
    special[1, 3], special[2, 40], special[3] = np.nan, np.inf, -0.0
    return jnp.asarray(np.concatenate([rows, bits, ties, special])).astype(dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("quantize", [quantize_mxfp8, quantize_fp8_token], ids=["mxfp8", "fp8_token"])
def test_quantisers_equal_the_references_to_the_bit(quantize: Any, dtype: Any) -> None:
    x = odd_rows(dtype)
    ours, theirs = quantize(x, implementation="triton"), quantize(x, implementation="reference")
    assert_same_bits(ours.scales, theirs.scales)
    assert_same_bits(np.asarray(ours.values).view(np.uint8), np.asarray(theirs.values).view(np.uint8))
    for empty in (x[:0], x[:, :0]):
        assert_same_bits(quantize(empty, implementation="triton").scales, quantize(empty).scales)
    batch = jax.vmap(lambda row: quantize(row, implementation="triton").scales)(x[None])
    assert_same_bits(batch[0], ours.scales)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=str)
@pytest.mark.parametrize("reach", [1e-4, 1.0, 100.0])
def test_activations(reach: float, dtype: Any) -> None:
    x = (reach * jax.random.normal(jax.random.key(0), (3, 2, 1100))).astype(dtype)
    limit = Tolerance(3e-6 if dtype == jnp.float32 else 2e-4)
    for betas in ({"beta": 4.0, "linear_beta": 25.0}, {"beta": 1.0, "linear_beta": None}):
        y = situ_and_mul(x, **betas, implementation="triton")
        assert_close(y, situ_and_mul(x, **betas), limit)
    assert_close(swiglu_and_mul(x, implementation="triton"), swiglu_and_mul(x), limit)


def test_the_gradient_of_an_activation() -> None:
    x = jax.random.normal(jax.random.key(1), (4, 64))
    ours, theirs = (
        jax.grad(lambda x, name=name: situ_and_mul(x, beta=4.0, linear_beta=25.0, implementation=name).sum())(x)
        for name in ("triton", "xla")
    )
    assert_close(ours, theirs, Tolerance(1e-6))


def test_a_layer_lays_its_experts_out_computes_and_differentiates() -> None:
    config = small_config(hidden_size=128, routed_expert_hidden_size=128, moe_intermediate_size=64)
    arrays = random_arrays(config, "w4a16")
    ours, theirs = (MoE(config, recipe="w4a16", implementation=name, arrays=arrays) for name in ("triton", "xla"))
    assert isinstance(ours.w13.get_value(), KernelWeights)
    x = random_tokens((12, 128), dtype="bfloat16")
    run = jax.jit(jax.value_and_grad(lambda x, layer: layer(x).astype(jnp.float32).sum()))
    (mine, my_gradient), (other, other_gradient) = run(x, ours), run(x, theirs)
    assert abs(float(mine) - float(other)) < 1e-2 * abs(float(other))
    assert_close(my_gradient, other_gradient, KERNEL_TOLERANCES["w4a16"])


@pytest.mark.parametrize("quantize", [quantize_mxfp8, quantize_fp8_token], ids=["mxfp8", "fp8_token"])
def test_nothing_flows_back_through_a_quantiser(quantize: Any) -> None:
    x = jax.random.normal(jax.random.key(2), (2, 64))
    gradient = jax.grad(lambda x: quantize(x, implementation="triton").dequantize(jnp.float32).sum() + x.sum())(x)
    assert_same_bits(gradient, jnp.ones_like(x))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=str)
@pytest.mark.parametrize(("slots", "columns"), [(3, 1100), (16, 64)])
def test_rows_gathered_and_added_up(slots: int, columns: int, dtype: Any) -> None:
    """Masked slots, and rows that nobody names, which hold NaN; sums equal `xla`'s but for fused products."""
    rng = np.random.default_rng(2)
    positions = rng.permutation(5 * slots + 4)[: 5 * slots].reshape(5, slots).astype(np.int32)
    positions[1, 0], positions[2] = -1, -1
    rows = np.full((5 * slots + 4, columns), np.nan, np.float32)
    rows[positions[positions >= 0]] = rng.standard_normal((int((positions >= 0).sum()), columns))
    weights = np.where(positions < 0, np.nan, rng.standard_normal(positions.shape)).astype(np.float32)
    given = jnp.asarray(rows).astype(dtype), jnp.asarray(positions), jnp.asarray(weights)
    mine, other = (combine_rows(*given, implementation=name) for name in ("triton", "xla"))
    assert_close(mine, other, Tolerance(1e-6))
    assert not np.asarray(mine)[2].any()
    schedule = schedule_rows(jnp.asarray(rng.integers(-1, 4, (len(rows), slots)), jnp.int32), 4)
    held = int(schedule.group_sizes.sum())
    gathered = gather_rows(given[0], schedule, implementation="triton")
    assert_same_bits(gathered[:held], given[0][schedule.token[:held]])
    batch = jax.vmap(lambda x: combine_rows(x, *given[1:], implementation="triton"))(given[0][None])
    assert_same_bits(batch[0], mine)
    assert gather_rows(given[0][:, :0], schedule, implementation="triton").shape == (schedule.token.size, 0)


def test_the_gradient_of_a_sum_of_rows() -> None:
    rows = jax.random.normal(jax.random.key(3), (7, 40))
    positions = jnp.asarray([[4, -1], [0, 6], [2, 3]], jnp.int32)
    weights = jax.random.normal(jax.random.key(4), positions.shape)

    def gradient(implementation: str) -> Any:
        def scalar(rows: jax.Array, weights: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(combine_rows(rows, positions, weights, implementation=implementation)))

        return jax.grad(scalar, argnums=(0, 1))(rows, weights)

    jax.tree.map(lambda mine, other: assert_close(mine, other, Tolerance(1e-6)), gradient("triton"), gradient("xla"))


@pytest.mark.parametrize("quantize", [quantize_mxfp8, quantize_fp8_token], ids=["mxfp8", "fp8_token"])
def test_scales_move_with_their_rows(quantize: Any) -> None:
    x = quantize(jax.random.normal(jax.random.key(5), (4, 96)))
    schedule = schedule_rows(jnp.asarray([[1, 0], [0, 2], [2, 1], [0, 1]], jnp.int32), 3)
    gathered = gather_rows(x, schedule, implementation="triton")
    jax.tree.map(lambda rows, tokens: assert_same_bits(rows, tokens[schedule.token]), gathered, x)


@pytest.mark.parametrize(("tokens", "picks", "groups"), [(1, 16, 896), (37, 16, 112), (5, 3, 2), (150, 16, 300)])
def test_slots_sorted_in_one_kernel(tokens: int, picks: int, groups: int) -> None:
    ids = jnp.asarray(np.random.default_rng(tokens).integers(-2, groups + 2, (tokens, picks)), jnp.int32)
    mine, other = (schedule_rows(ids, groups, implementation=name) for name in ("triton", "xla"))
    jax.tree.map(np.testing.assert_array_equal, mine, other)


@pytest.mark.parametrize(("columns", "k"), [(896, 16), (7, 7), (1, 1)])
def test_the_largest_of_each_row(columns: int, k: int) -> None:
    values = np.random.default_rng(columns).integers(-9, 9, (5, columns)).astype(np.float32)
    values[0] = [(np.nan, -0.0, np.inf, 0.0, -np.inf)[i % 5] for i in range(columns)]
    mine, other = (stable_top_k(jnp.asarray(values), k, implementation=name) for name in ("triton", "xla"))
    np.testing.assert_array_equal(mine, other)


def test_what_the_kernels_do_not_hold() -> None:
    assert "longer than the 4096" in explain("stable_top_k", x=jnp.zeros((2, 5000))).others["triton"]
    assert "has 4112 slots" in explain("schedule_rows", x=jnp.zeros((257, 16), jnp.int32)).others["triton"]
    assert "takes float32" in explain("stable_top_k", x=jnp.zeros((2, 8), jnp.bfloat16)).others["triton"]
