"""`dense_matmul` against float64, and around a kernel that stands in for Mosaic's: gradients, `vmap`, no rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotations import unchecked_annotations
from gemm_truth import grouped_product
from numerics import KERNEL_TOLERANCES, as_float64, assert_close, assert_same_bits, relative_l2, round_bf16

from k3jax.moe import latents
from pallas_kernels import Activation, Situ, SwiGLU, dense_matmul, quantize_fp8_block, select
from pallas_kernels.grouped_matmul import mosaic_hopper_dense
from pallas_kernels.rounding import to_bfloat16

KIMI = Situ(4.0, 25.0)
ROWS, LEAD, N, K = 10, 2, 24, 192

pytestmark = pytest.mark.usefixtures("quickly_compiled")


@functools.cache
def operands(seed: int = 0) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((LEAD, N, K)) * K**-0.5
    return jnp.asarray(rng.standard_normal((ROWS, K)), jnp.bfloat16), jnp.asarray(w, jnp.bfloat16)


def addend(rows: int = ROWS) -> jax.Array:
    return jnp.asarray(np.random.default_rng(rows).standard_normal((rows, LEAD * N)), jnp.bfloat16)


def truth(x: jax.Array, w: np.ndarray, activation: Activation | None) -> np.ndarray:
    """Leading axes of `w` join its rows, so that of two the first is the gate."""
    return grouped_product(as_float64(x), w.reshape(1, -1, K), np.array([x.shape[0]]), activation)


@pytest.mark.parametrize("implementation", ["reference", "xla", None])
@pytest.mark.parametrize("activation", [None, KIMI, SwiGLU()], ids=str)
def test_every_implementation_against_float64(activation: Activation | None, implementation: str | None) -> None:
    x, w = operands()
    product = functools.partial(dense_matmul, activation=activation, implementation=implementation)
    expected = truth(x, as_float64(w), activation)
    rounded, sums = product(x, w), product(x, w, out_format="f32")
    assert (rounded.dtype, sums.dtype) == (jnp.bfloat16, jnp.float32)
    assert_close(rounded, round_bf16(expected), KERNEL_TOLERANCES["bf16"])
    assert relative_l2(sums, expected) < (1e-6 if activation is None else 2e-4)  # gate and up round otherwise


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_an_addend_joins_the_rounded_product(implementation: str) -> None:
    """In float32, and the sum is rounded again."""
    x, w = operands()
    product = functools.partial(dense_matmul, implementation=implementation)
    found = product(x, w, addend=addend())
    expected = as_float64(product(x, w)).astype(np.float32) + as_float64(addend()).astype(np.float32)
    assert_same_bits(found, expected.astype(jnp.bfloat16))
    assert (found != to_bfloat16(product(x, w, out_format="f32") + addend().astype(jnp.float32))).any()
    assert product(x[:0], w, addend=addend()[:0]).shape == (0, LEAD * N)


def test_fp8_weights_are_what_they_decode_to() -> None:
    x, w = operands()
    quantised = quantize_fp8_block(w)
    product = functools.partial(dense_matmul, activation=KIMI)
    assert_same_bits(product(x, quantised), product(x, quantised.dequantize()))


@pytest.mark.parametrize(
    ("x", "w", "how", "message"),
    [
        ((3, 64), (24, 32), {}, r"x \(3, 64\) and w \(24, 32\) must be \[M, K\] and \[..., N, K\]"),
        ((3, 64), (64,), {}, "must be"),
        ((3, 64), (5, 64), {"activation": KIMI}, r"w \(5, 64\) must have an even N"),
        ((3, 64), (4, 64), {"out_format": "mxfp8"}, "out_format='mxfp8' is not one of bf16, f32"),
        (
            (3, 64),
            (4, 64),
            {"addend": jnp.ones((3, 2), jnp.bfloat16)},
            r"addend bfloat16\(3, 2\) must be bfloat16 \(3, 4\)",
        ),
        ((3, 64), (4, 64), {"addend": jnp.ones((3, 4))}, r"addend float32\(3, 4\) must be bfloat16 \(3, 4\)"),
        (
            (3, 64),
            (4, 64),
            {"addend": jnp.ones((3, 4), jnp.bfloat16), "out_format": "f32"},
            "an addend goes with neither .* nor out_format='f32'",
        ),
        (
            (3, 64),
            (4, 64),
            {"addend": jnp.ones((3, 2), jnp.bfloat16), "activation": KIMI},
            "an addend goes with neither activation=Situ",
        ),
        ((3, 64), (4, 64), {"implementation": "cublas"}, "implementation='cublas' is not one of"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(x: tuple[int, ...], w: tuple[int, ...], how: Any, message: str) -> None:
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        dense_matmul(jnp.ones(x, jnp.bfloat16), jnp.ones(w, jnp.bfloat16), **how)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """A CPU that claims Mosaic's kernel, for which NumPy stands in; the shapes of the rows that it was traced with."""
    traced: list[tuple[int, ...]] = []

    def stand_in(
        x: Any, w: Any, group_sizes: Any, *, activation: Any, addend: Any, out_format: str, fine_sums: bool
    ) -> Any:
        assert w.shape == (1, LEAD * N, K)
        assert not fine_sums
        traced.append(x.shape)
        width = LEAD * N // (2 if activation else 1)
        result = jax.ShapeDtypeStruct((x.shape[0], width), jnp.float32 if out_format == "f32" else jnp.bfloat16)

        def multiply(x: Any, w: Any, sizes: Any, *addend: Any) -> np.ndarray:
            y = grouped_product(as_float64(x), as_float64(w), np.asarray(sizes), activation).astype(result.dtype)
            return (as_float64(y) + as_float64(addend[0])).astype(result.dtype) if addend else y

        return jax.pure_callback(multiply, result, x, w, group_sizes, *(() if addend is None else (addend,)))

    monkeypatch.setattr(select, "why_not_on_gpu", lambda name, _: None if name == "mosaic" else "absent")
    monkeypatch.setattr(mosaic_hopper_dense, "grouped_matmul", stand_in)
    return traced


named: Any = functools.partial(dense_matmul, implementation="mosaic")  # what is traced so meets no other test


@pytest.mark.parametrize(("activation", "out_format"), [(None, "f32"), (KIMI, "bf16")], ids=str)
def test_behind_the_kernel_gradients_are_those_of_the_formula(
    activation: Activation | None, out_format: Any, kernel: list[tuple[int, ...]]
) -> None:
    """Those of x and of the weights, of fp8 weights' x, and recomputed."""
    x, w = operands()
    weight = jnp.asarray(np.random.default_rng(1).standard_normal((ROWS, 1)), jnp.float32)

    def loss(x: Any, w: Any, implementation: str) -> jax.Array:
        y = dense_matmul(x, w, activation=activation, out_format=out_format, implementation=implementation)
        return jnp.sum(y.astype(jnp.float32) * weight)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    again = jax.jit(jax.grad(jax.checkpoint(loss, static_argnums=2), argnums=(0, 1)), static_argnums=2)
    expected = gradient(x, w, "xla")
    for found in (gradient(x, w, "mosaic"), again(x, w, "mosaic")):
        for ours, theirs in zip(found, expected, strict=True):
            assert_same_bits(ours, theirs)
    of_x = jax.jit(jax.grad(loss), static_argnums=2)
    quantised = quantize_fp8_block(w)
    assert_same_bits(of_x(x, quantised, "mosaic"), of_x(x, quantised, "xla"))
    assert kernel


def test_vmap_over_rows_is_one_product_of_all_and_over_weights_one_by_one(kernel: list[tuple[int, ...]]) -> None:
    x, w = operands()
    others = jnp.stack([w, *(operands(seed)[1] for seed in (1, 2))])
    product = functools.partial(named, activation=SwiGLU())
    expected = product(x, w)
    assert_close(expected, round_bf16(truth(x, as_float64(w), SwiGLU())), KERNEL_TOLERANCES["bf16"])
    assert kernel == [(ROWS, K)]
    batched = jax.vmap(jax.vmap(product, in_axes=(0, None)), in_axes=(0, None))(x.reshape(1, 5, 2, K), w)
    assert_same_bits(batched.reshape(ROWS, N), expected)
    assert kernel[-1] == (ROWS, K)
    each = jax.vmap(product, in_axes=(None, 0))(x, others)
    both = jax.vmap(product)(jnp.stack([x, -x, x]), others)
    assert kernel[-1] == (ROWS, K)
    for index in (0, 2):
        for found in (each, both):
            assert_same_bits(found[index], product(x, others[index]))
    slopes = jax.vmap(jax.grad(lambda x: jnp.sum(product(x, w).astype(jnp.float32))))(x[:, None])
    assert slopes.shape == (ROWS, 1, K)


def test_behind_the_kernel_an_addend_has_a_gradient_and_rows_as_x_has(kernel: list[tuple[int, ...]]) -> None:
    x, w = operands()
    added = addend()

    def pullback(implementation: str) -> Any:
        product = functools.partial(dense_matmul, implementation=implementation)
        return jax.vjp(lambda x, w, addend: product(x, w, addend=addend), x, w, added)[1]

    dy = addend(ROWS + 1)[1:]
    ours, theirs, alone = pullback("mosaic")(dy), pullback("xla")(dy), jax.vjp(named, x, w)[1](dy)
    for found, expected in ((ours, theirs), (ours, (*alone, dy)), (theirs, (*alone, dy))):
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one, other)

    def product(x: Any, w: Any, addend: Any) -> Any:
        return named(x, w, addend=addend)

    expected = named(x, w, addend=added)
    assert_same_bits(expected, dense_matmul(x, w, addend=added, implementation="reference"))
    both = jax.vmap(product, in_axes=(0, None, 0))(x.reshape(5, 2, K), w, added.reshape(5, 2, -1))
    assert_same_bits(both.reshape(expected.shape), expected)
    assert kernel[-1] == (ROWS, K)
    of_x = jax.vmap(product, in_axes=(0, None, None))(jnp.stack([x, -x]), w, added)
    of_addends = jax.vmap(product, in_axes=(None, None, 0))(x, w, jnp.stack([added, -added]))
    assert kernel[-1] == (2 * ROWS, K)
    each = jax.vmap(product, in_axes=(None, 0, 0))(x, jnp.stack([w, -w]), jnp.stack([added, -added]))
    assert_same_bits(of_x[1], product(-x, w, added))
    assert_same_bits(of_addends[1], product(x, w, -added))
    assert_same_bits(each[1], product(x, -w, -added))


def test_no_rows_need_no_kernel(kernel: list[tuple[int, ...]]) -> None:
    x, w = operands()
    assert named(x[:0], w, activation=KIMI, out_format="f32").shape == (0, N)
    assert kernel == []


def test_the_kernel_comes_first_where_it_fits(kernel: list[tuple[int, ...]]) -> None:
    x, w = operands()
    explained = select.explain("dense_matmul", x=x, w=w, activation=KIMI)
    assert explained.chosen == "mosaic"
    assert "DenseTuning" in str(explained)
    assert explained.others["triton"] == "dense_matmul has no such kernel"
    assert select.explain("dense_matmul", x=x, w=quantize_fp8_block(w)).chosen == "mosaic"
    for other_x, other_w, reason in (
        (x.astype(jnp.float32), w, "x is float32; bfloat16 is needed"),
        (x, w.astype(jnp.float16), "w is float16; bfloat16 is needed"),
        (x[:, :32], w[:, :, :32], "K of 64"),
        (x, w[:, :4], "N must be a multiple of 16"),
    ):
        explained = select.explain("dense_matmul", x=other_x, w=other_w, activation=KIMI)
        assert explained.chosen == "xla"
        assert reason in explained.others["mosaic"]
        with pytest.raises(NotImplementedError, match=f"'mosaic': .*{reason}"):
            named(other_x, other_w, activation=KIMI)


def test_what_the_experts_see_is_summed_finely(kernel: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[tuple[Any, bool]] = set()

    def stand_in(x: Any, w: Any, group_sizes: Any, **how: Any) -> jax.Array:
        asked.add((w.shape, how["fine_sums"]))
        return (x @ w[0].T).astype(jnp.bfloat16)

    monkeypatch.setattr(mosaic_hopper_dense, "grouped_matmul", stand_in)
    w = jnp.ones((192, 64), jnp.bfloat16)
    jax.grad(lambda x: jnp.sum(latents(x, w).astype(jnp.float32)))(jnp.ones((3, 64), jnp.bfloat16))
    assert asked == {((1, 192, 64), True)}
    assert not kernel
