"""`grouped_matmul` under transformations: the gradient for x, vmap, memory at the model's sizes, and its refusals."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotations import unchecked_annotations
from cases import KIMI, KIMI_GATE_UP, Case, make_operands, make_weights
from format_truth import decode_mxfp4
from gemm_truth import grouped_input_gradient, grouped_product
from numerics import KERNEL_TOLERANCES, as_float64, assert_close, assert_same_bits, relative_l2, round_bf16

from pallas_kernels import (
    Activation,
    MXFP4Array,
    Situ,
    SwiGLU,
    grouped_matmul,
    quantize_fp8_token,
    quantize_mxfp8,
    to_kernel_layout,
)

IMPLEMENTATIONS = ("reference", "xla")
MIB = 1 << 20


def dense64(w: Any) -> np.ndarray:
    return decode_mxfp4(np.asarray(w.codes), np.asarray(w.scales)) if isinstance(w, MXFP4Array) else as_float64(w)


# ---- gradient


def check_input_gradient(case: Case, implementation: str, *, laid_out: bool = False) -> None:
    """dx of half of the rows against float64; the others' is zero. `laid_out`: the experts in a kernel's layout."""
    operands, activation = make_operands(case), case.activation
    used = int(operands.group_sizes.sum())
    assert used == case.rows // 2
    width = case.width // 2 if activation else case.width
    dy = round_bf16(np.random.default_rng(5).standard_normal((case.rows, width)))
    dy[used:] = np.nan  # the gradient of rows in no group is zero whatever comes back for them
    w = operands.w
    if laid_out:
        assert isinstance(w, MXFP4Array)
        w = to_kernel_layout(w, recipe=case.recipe, gated=activation is not None)

    @jax.jit
    def gradient(x: jax.Array, dy: jax.Array) -> jax.Array:
        sizes = jnp.asarray(operands.group_sizes)

        def call(x: jax.Array) -> Any:
            return grouped_matmul(
                x, w, sizes, activation=activation, out_format=case.out_format, implementation=implementation
            )

        y, pullback = jax.vjp(call, x)
        return pullback(dy.astype(y.dtype))[0]

    dx = gradient(operands.x, jnp.asarray(dy, jnp.float32))
    assert dx.dtype == jnp.bfloat16
    expected = grouped_input_gradient(as_float64(operands.x), dense64(operands.w), operands.group_sizes, activation, dy)
    assert_close(dx, round_bf16(expected), KERNEL_TOLERANCES[case.recipe])
    assert not np.asarray(dx[used:]).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("recipe", "activation", "out_format"),
    [
        ("bf16", None, "f32"),
        ("bf16", KIMI, "bf16"),
        ("bf16", SwiGLU(), "f32"),
        ("w4a16", None, "bf16"),
        ("w4a16", KIMI, "f32"),
        ("w4a16", Situ(1.0, None), "bf16"),
    ],
)
def test_the_gradient_for_x_equals_float64(
    recipe: str, activation: Activation | None, out_format: str, implementation: str
) -> None:
    check_input_gradient(Case(recipe, 40, 5, 64, 96, "half of the rows", activation, out_format), implementation)


def test_the_gradient_adds_up_over_several_column_tiles() -> None:
    operands = make_operands(Case("w4a16", 24, 2, 2048, 2048, "balanced"))
    sizes = jnp.asarray(operands.group_sizes)
    dy = round_bf16(np.random.default_rng(8).standard_normal((24, 2048)))
    _, pullback = jax.vjp(lambda x: grouped_matmul(x, operands.w, sizes, implementation="xla"), operands.x)
    (dx,) = pullback(jnp.asarray(dy, jnp.bfloat16))
    expected = grouped_input_gradient(as_float64(operands.x), dense64(operands.w), operands.group_sizes, None, dy)
    assert_close(dx, round_bf16(expected), KERNEL_TOLERANCES["w4a16"])


def test_the_truth_s_gradient_is_that_of_its_forward_formula() -> None:
    """`grouped_input_gradient` against differences of `grouped_product` along a random direction."""
    rng = np.random.default_rng(6)
    x, w = round_bf16(rng.standard_normal((6, 32))), round_bf16(rng.standard_normal((2, 8, 32)))
    sizes, dy = np.array([4, 2]), rng.standard_normal((6, 8))
    direction, step = rng.standard_normal(x.shape), 1e-4
    slope = (grouped_product(x + step * direction, w, sizes) - grouped_product(x - step * direction, w, sizes)) / 2e-4
    ours = np.sum(grouped_input_gradient(x, w, sizes, None, round_bf16(dy)) * direction)
    assert ours == pytest.approx(np.sum(round_bf16(dy) * slope), rel=1e-6)


def test_reference_and_xla_agree_under_grad_remat_and_a_second_use() -> None:
    operands = make_operands(Case("w4a16", 24, 2, 64, 64, "balanced"))
    sizes = jnp.asarray(operands.group_sizes)

    def loss(x: jax.Array, implementation: str) -> jax.Array:
        hidden = grouped_matmul(x, operands.w, sizes, implementation=implementation)
        return jnp.sum(grouped_matmul(hidden, operands.w, sizes, out_format="f32", implementation=implementation) ** 2)

    one, other = (jax.jit(jax.grad(loss), static_argnums=1)(operands.x, name) for name in IMPLEMENTATIONS)
    assert_close(other, one, KERNEL_TOLERANCES["w4a16"])
    remat = jax.jit(jax.grad(jax.checkpoint(loss, static_argnums=1)), static_argnums=1)(operands.x, "xla")
    assert_same_bits(remat, other)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_that_do_not_exist_are_refused(implementation: str) -> None:
    x, w = jnp.ones((4, 32), jnp.bfloat16), jnp.ones((2, 32, 32), jnp.bfloat16)
    sizes = jnp.array([2, 2], jnp.int32)

    def total(x: Any, w: jax.Array, out_format: str = "f32") -> jax.Array:
        y: Any = grouped_matmul(x, w, sizes, out_format=out_format, implementation=implementation)
        return jnp.sum(y if isinstance(y, jax.Array) else y.dequantize(jnp.float32))

    with pytest.raises(NotImplementedError, match="no gradient with respect to w: experts are frozen"):
        jax.grad(total, argnums=1)(x, w)
    with pytest.raises(NotImplementedError, match="no gradient with respect to w"):
        jax.jit(jax.grad(total, argnums=(0, 1)))(x, w)
    for quantize in (quantize_mxfp8, quantize_fp8_token):
        with pytest.raises(NotImplementedError, match="no gradient with respect to a quantised x; pass bfloat16 rows"):
            jax.grad(total, allow_int=True)(quantize(x), w)
    for out_format in ("mxfp8", "fp8_token"):  # not silently zero
        with pytest.raises(NotImplementedError, match=f"no gradient through out_format='{out_format}'"):
            jax.grad(total)(x, w, out_format)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: total(x, w), (x,), (x,))


# ---- vmap


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_over_rows_sizes_and_weights_equals_a_loop(implementation: str) -> None:
    rng = np.random.default_rng(7)
    x = jnp.asarray(rng.standard_normal((3, 10, 64), np.float32)).astype(jnp.bfloat16)
    sizes = jnp.array([[4, 6], [10, 0], [0, 3]], jnp.int32)
    stacked = make_weights(Case("w4a16", 0, 6, 32, 64), rng)
    w = jax.tree.map(lambda leaf: leaf.reshape(3, 2, *leaf.shape[1:]), stacked)

    def call(x: Any, w: Any, sizes: jax.Array) -> jax.Array:
        y = grouped_matmul(x, w, sizes, activation=KIMI, implementation=implementation)
        return jnp.where(jnp.arange(10)[:, None] < jnp.sum(sizes), y, 0)  # what lies beyond is unspecified

    once = jax.jit(call)
    shared = jnp.stack([once(x[i], w[0], sizes[i]) for i in range(3)])
    assert_same_bits(jax.jit(jax.vmap(call, in_axes=(0, None, 0)))(x, w[0], sizes), shared)
    own = jnp.stack([once(x[i], w[i], sizes[i]) for i in range(3)])
    assert_same_bits(jax.jit(jax.vmap(call))(x, w, sizes), own)
    q = jax.jit(quantize_mxfp8)(x)
    quantized = jnp.stack([once(jax.tree.map(lambda leaf, i=i: leaf[i], q), w[i], sizes[i]) for i in range(3)])
    assert_same_bits(jax.jit(jax.vmap(call))(q, w, sizes), quantized)

    @jax.jit
    def gradient(x: jax.Array, w: MXFP4Array, sizes: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jnp.sum(call(x, w, sizes).astype(jnp.float32)))(x)

    expected = jnp.stack([gradient(x[i], w[i], sizes[i]) for i in range(3)])
    assert_same_bits(jax.jit(jax.vmap(gradient))(x, w, sizes), expected)
    batched = jax.jit(jax.grad(lambda x: jnp.sum(jax.vmap(call)(x, w, sizes).astype(jnp.float32))))(x)
    assert relative_l2(batched, expected) < 1e-6


# ---- memory


def temporaries(function: Callable[..., Any], *operands: Any) -> int:
    """Bytes that the compiled function needs beside its arguments and its result."""
    memory = jax.jit(function).lower(*operands).compile().memory_analysis()
    assert memory is not None
    return int(memory.temp_size_in_bytes)


def abstract_operands(recipe: str, *, rows: int, groups: int, depth: int, width: int) -> tuple[Any, Any, Any]:
    shape = jax.ShapeDtypeStruct
    operands: dict[str, Any] = {
        "w4a8": jax.eval_shape(lambda x: quantize_mxfp8(x), shape((rows, depth), jnp.bfloat16)),
        "w4a8_fp8": jax.eval_shape(lambda x: quantize_fp8_token(x), shape((rows, depth), jnp.bfloat16)),
    }
    x = operands.get(recipe, shape((rows, depth), jnp.bfloat16))
    if recipe == "bf16":
        return x, shape((groups, width, depth), jnp.bfloat16), shape((groups,), jnp.int32)
    codes, scales = (shape((groups, width, depth // part), jnp.uint8) for part in (2, 32))
    return x, jax.eval_shape(MXFP4Array, codes, scales), shape((groups,), jnp.int32)


@pytest.mark.parametrize(
    ("recipe", "activation", "out_format"),
    [
        ("bf16", None, "bf16"),
        ("w4a16", None, "f32"),
        ("w4a16", KIMI, "bf16"),
        ("w4a8", KIMI, "bf16"),
        ("w4a8_fp8", KIMI, "bf16"),
    ],
)
def test_fault_22_temporaries_at_the_model_s_sizes_stay_below_the_output(
    recipe: str, activation: Activation | None, out_format: str
) -> None:
    """A dense expansion would take 64 x 32,768 x 3,584 x 2 bytes = 14 GiB."""
    operands = abstract_operands(recipe, rows=32_768, groups=64, **KIMI_GATE_UP)

    def call(x: Any, w: Any, group_sizes: jax.Array) -> Any:
        return grouped_matmul(x, w, group_sizes, activation=activation, out_format=out_format, implementation="xla")

    result = jax.eval_shape(call, *operands)
    assert result.size * result.dtype.itemsize >= 192 * MIB
    rows_as_bf16 = 32_768 * 3584 * 2 if recipe in ("w4a8", "w4a8_fp8") else 0
    # A GPU's tile of decoded weights is larger, so that a step is worth its launch, and its matmuls have a workspace.
    tile = 32 * MIB if jax.default_backend() == "cpu" else 192 * MIB
    assert temporaries(call, *operands) - rows_as_bf16 < tile


def test_fault_22_the_gradient_s_temporaries_do_not_grow_with_the_number_of_groups() -> None:
    def gradient_temporaries(groups: int, activation: Activation | None) -> int:
        def gradient(x: jax.Array, w: Any, sizes: jax.Array) -> jax.Array:
            def total(x: jax.Array) -> jax.Array:
                y = grouped_matmul(x, w, sizes, activation=activation, out_format="f32", implementation="xla")
                return jnp.sum(y)

            return jax.grad(total)(x)

        return temporaries(gradient, *abstract_operands("w4a16", rows=32_768, groups=groups, **KIMI_GATE_UP))

    rows_f32, gate_up_f32 = 32_768 * 3584 * 4, 32_768 * 6144 * 4
    assert gradient_temporaries(64, None) < rows_f32 + gate_up_f32 + 32 * MIB
    of_64_groups = gradient_temporaries(64, KIMI)
    assert of_64_groups < 3 * gate_up_f32
    assert gradient_temporaries(256, KIMI) < of_64_groups + MIB


# ---- refusals


def bf16(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.bfloat16)


ROWS, WEIGHTS, SIZES = bf16(8, 64), bf16(2, 64, 64), jnp.array([3, 5], jnp.int32)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((ROWS[None], WEIGHTS, SIZES), {}, r"x \(1, 8, 64\) and w \(2, 64, 64\) must be \[M, K\] and \[G, N, K\]"),
        ((ROWS, WEIGHTS[0], SIZES), {}, r"x \(8, 64\) and w \(64, 64\)"),
        ((ROWS[:, :32], WEIGHTS, SIZES), {}, r"x \(8, 32\) and w \(2, 64, 64\) .* with the same K"),
        ((ROWS.astype(jnp.float32), WEIGHTS, SIZES), {}, "x is float32; cast it to bfloat16, or quantise it"),
        ((np.zeros((8, 64), np.float32), WEIGHTS, SIZES), {}, "x is float32; cast it"),
        ((ROWS, WEIGHTS.astype(jnp.float16), SIZES), {}, "w is float16; cast it"),
        ((ROWS, WEIGHTS, SIZES[:1]), {}, r"group_sizes must be integers \[2\], .* not int32\[1\]"),
        ((ROWS, WEIGHTS, SIZES.astype(jnp.float32)), {}, r"group_sizes must be integers \[2\], .* not float32\[2\]"),
        ((ROWS, WEIGHTS, SIZES), {"out_format": "fp16"}, "out_format='fp16' is not one of bf16, f32, mxfp8, fp8_token"),
        ((ROWS, WEIGHTS[:, :33], SIZES), {"activation": KIMI}, r"w \(2, 33, 64\) must have an even N .* Situ\(beta=4"),
        ((ROWS, WEIGHTS[:, :48], SIZES), {"out_format": "mxfp8"}, r"multiple of 32; w is \(2, 48, 64\)"),
        ((ROWS, WEIGHTS[:, :32], SIZES), {"out_format": "mxfp8", "activation": KIMI}, r"w is \(2, 32, 64\)"),
        ((ROWS, WEIGHTS, SIZES), {"implementation": "cuda"}, "implementation='cuda' is not one of reference, xla"),
    ],
)
def test_wrong_arguments_raise_with_what_was_given(
    arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        grouped_matmul(*arguments, **options)


@pytest.mark.parametrize("name", ["triton", "mosaic"])
def test_fault_6_an_implementation_that_cannot_run_raises_with_the_reason(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"'{name}': .*; pass xla or reference"):
        grouped_matmul(ROWS, WEIGHTS, SIZES, implementation=name)


def test_annotations_catch_wrong_shapes_under_test() -> None:
    with pytest.raises(TypeError, match="group_sizes"):
        grouped_matmul(ROWS, WEIGHTS, SIZES[:1])
    with pytest.raises(TypeError, match="'w'"):
        grouped_matmul(ROWS[:, :32], WEIGHTS, SIZES)


def test_group_sizes_of_any_integer_type_mean_the_same() -> None:
    operands = make_operands(Case("bf16", 300, 3, 64, 64, "skewed"))
    expected = grouped_matmul(operands.x, operands.w, jnp.asarray(operands.group_sizes))
    for implementation in IMPLEMENTATIONS:
        for dtype in (jnp.uint8, jnp.uint32, jnp.int16):
            with unchecked_annotations():
                y = grouped_matmul(
                    operands.x,
                    operands.w,
                    jnp.asarray(operands.group_sizes).astype(dtype),
                    implementation=implementation,
                )
            assert relative_l2(y, expected) < 1e-3
