"""The operands and calls behind a row of `k3jax bench`. Random numbers always: zeros run faster than real data."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16

from k3jax.bench.cases import GROUPS, Case
from k3jax.bench.dense_cases import DenseCase
from k3jax.compiling import compiler_options
from k3jax.experts import RECIPES, Weights
from pallas_kernels import (
    MXFP4Array,
    Situ,
    combine_rows,
    gather_rows,
    grouped_matmul,
    lay_out,
    quantize_fp8_token,
    quantize_mxfp8,
    schedule_rows,
    situ_and_mul,
)
from pallas_kernels.rounding import to_bfloat16
from pallas_kernels.situ import apply_activation

KIMI = Situ(4.0, 25.0)
CHECKED_ROWS = 128
_programs: dict[Any, tuple[Callable[..., Any], float]] = {}  # of products: what was compiled, and how long it took


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program and the operands to call it with. `compile_s`: seconds of tracing, lowering and compiling."""

    executable: Callable[..., Any]
    operands: tuple[Any, ...]
    compile_s: float

    def __call__(self) -> Any:
        return self.executable(*self.operands)


def compiled(function: Callable[..., Any], *operands: Any, side_by_side: bool = True) -> Program:
    """`function` compiled for `operands`: for the first time, unless a cache on disk is on.

    Kernels of it may run side by side, or else one after the other, as they do unless XLA is told.
    """
    start = time.perf_counter()
    options = compiler_options() if side_by_side else None
    executable = jax.jit(function, compiler_options=options).lower(*operands).compile()
    return Program(executable, operands, time.perf_counter() - start)


def make_rows(case: Case | DenseCase) -> BFloat16[Array, "rows depth"]:
    """Unit-normal rows."""
    return _normal(jax.random.key(case.seed + case.rows), (case.rows, case.depth))


def make_experts(case: Case) -> MXFP4Array:
    """All MXFP4 codes, with scales over six octaves: `[groups, columns, depth]`."""
    assert case.groups is not None
    keys = jax.random.split(jax.random.key(case.seed), case.groups)
    return _random_experts(keys, case.columns, case.depth)


def expert_weights(experts: MXFP4Array, case: Case, implementation: str | None) -> Weights:
    """The experts as `implementation` takes them for the case's recipe."""
    if case.recipe == "bf16":
        return plain_experts(experts)
    return lay_out(experts, recipe=case.recipe, gated=case.gated, implementation=implementation)


def quantized_rows(case: Case, rows: Array) -> Any:
    """The rows as the recipe's product takes them."""
    quantize = RECIPES[case.recipe].quantize
    return rows if quantize is None else quantize(rows)


def product_call(
    case: Case, x: Any, w: Weights, *, implementation: str, out_format: str = "bf16", quantize: bool = False
) -> Program:
    """The op on `x` and `w`, compiled as one program; with `quantize`, that of the bfloat16 rows `x` is part of it.

    Cases that differ in their distribution share a program, and its `compile_s`.
    """
    key = dataclasses.replace(case, distribution=None), implementation, out_format, quantize
    quantizer = RECIPES[case.recipe].quantize if quantize else None
    sizes = jnp.asarray(case.group_sizes)
    activation = KIMI if case.gated else None

    def product(x: Any, w: Any, sizes: Array) -> Any:
        rows = x if quantizer is None else quantizer(x)
        return grouped_matmul(
            rows, w, sizes, activation=activation, out_format=out_format, implementation=implementation
        )

    if key not in _programs:
        program = compiled(product, x, w, sizes)
        _programs[key] = program.executable, program.compile_s
    executable, compile_s = _programs[key]
    return Program(executable, (x, w, sizes), compile_s)


def elementwise_call(case: Case, x: Array, implementation: str) -> Program:
    """SiTU of rows of gate and up, a quantiser, or rows sorted, gathered from tokens or added up to them."""
    operation: Callable[..., Any]
    if case.op in ("schedule", "gather", "combine"):
        return _move_call(case, x, implementation)
    if case.op == "situ":
        operation = functools.partial(situ_and_mul, beta=KIMI.beta, linear_beta=KIMI.linear_beta)
    else:
        operation = quantize_mxfp8 if case.recipe == "w4a8" else quantize_fp8_token
    return compiled(functools.partial(operation, implementation=implementation), x)


def _move_call(case: Case, x: Array, implementation: str) -> Program:
    """Rows in the order of experts that tokens pick at random."""
    keys = jax.random.split(jax.random.key(case.seed))
    shape = case.tokens, case.picks
    ids = jax.random.randint(keys[0], shape, 0, GROUPS)
    if case.op == "schedule":
        return compiled(functools.partial(schedule_rows, groups=GROUPS, implementation=implementation), ids)
    schedule = jax.jit(schedule_rows, static_argnums=1)(ids, GROUPS)
    if case.op == "gather":
        operation = functools.partial(gather_rows, implementation=implementation)
        return compiled(operation, x[: case.tokens], schedule)
    weights = jax.random.uniform(keys[1], shape)
    return compiled(functools.partial(combine_rows, implementation=implementation), x, schedule.row, weights)


def relative_error(case: Case, x: Any, experts: MXFP4Array, y: Array) -> float:
    """Relative L2 of the first rows of the busiest expert, against the recipe's product in float32."""
    sizes = case.group_sizes
    busiest = int(np.argmax(sizes))
    start = int(sizes[:busiest].sum())
    count = min(int(sizes[busiest]), CHECKED_ROWS)
    return float(_relative_error(x, experts, y, busiest, start, count=count, gated=case.gated))


# Compiled once for all cases of one shape.


@functools.partial(jax.jit, static_argnames=("shape",))
def _normal(key: Array, shape: tuple[int, ...]) -> Array:
    return jax.random.normal(key, shape).astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnames=("shape",))
def normal_weight(key: Array, shape: tuple[int, ...]) -> Array:
    """bfloat16 normal values of variance 1 / `shape[-1]`."""
    return (jax.random.normal(key, shape) * shape[-1] ** -0.5).astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnames=("columns", "depth"))
def _random_experts(keys: Array, columns: int, depth: int) -> MXFP4Array:
    def expert(key: Array) -> MXFP4Array:
        codes, scales = jax.random.split(key)
        return MXFP4Array(
            jax.random.bits(codes, (columns, depth // 2), jnp.uint8),
            jax.random.randint(scales, (columns, depth // 32), 118, 124).astype(jnp.uint8),
        )

    return jax.lax.map(expert, keys)  # one at a time: the generator's temporaries are several times its result


@jax.jit
def plain_experts(experts: MXFP4Array) -> Array:
    """The experts in bfloat16."""
    return jax.lax.map(lambda expert: expert.dequantize(jnp.bfloat16), experts)


@functools.partial(jax.jit, static_argnames=("count", "gated"))
def _relative_error(x: Any, experts: MXFP4Array, y: Array, g: Array, start: Array, *, count: int, gated: bool) -> Array:
    def part(leaf: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(leaf, start, count)

    rows = jax.tree.map(part, x)
    exact = rows.astype(jnp.float32) if isinstance(rows, jax.Array) else rows.dequantize(jnp.float32)
    return product_error(exact, experts[g].dequantize(jnp.float32), part(y), gated)


def product_error(x: Array, w: Array, y: Array, gated: bool) -> Array:
    """Relative L2 of `y` against the product of float32 `x` and `w` rounded to bfloat16, with `gated` SiTU of it."""
    product = to_bfloat16(jnp.matmul(x, w.T, precision="highest"))
    expected = (apply_activation(KIMI, product) if gated else product).astype(jnp.float32)
    return jnp.linalg.norm(y.astype(jnp.float32) - expected) / jnp.linalg.norm(expected)
