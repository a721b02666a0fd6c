"""The figures of `k3jax bench` for the parts of the routed path: grouped products, and what only moves numbers."""

import functools
import gc
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from k3jax.bench import calls
from k3jax.bench.cases import GEMMS, Case
from k3jax.bench.layer_cases import LayerCase
from k3jax.bench.results import Result, roof_us
from k3jax.bench.timing import Stopwatch
from k3jax.experts import RECIPES
from pallas_kernels import explain

XLA_LIMIT = 1.0  # seconds of one call beyond which the `xla` implementation is not worth timing
MOVES = {"schedule": "schedule_rows", "gather": "gather_rows", "combine": "combine_rows"}
PLAIN = {"situ": "situ_and_mul", **MOVES}
"""Ops without recipes, and their names in `explain`."""

_QUANTIZERS = {"w4a8": "quantize_mxfp8", "w4a8_fp8": "quantize_fp8_token"}


def choose(case: Case | LayerCase, implementation: str | None) -> str:
    """The implementation that would run a case on experts in the layout that this one wants.

    Raises:
        NotImplementedError: the named implementation cannot run it.
    """
    weights = None
    product = isinstance(case, LayerCase) or case.op in GEMMS
    if case.recipe == "bf16" and product:  # plain: there is no layout to choose
        weights = jax.ShapeDtypeStruct((case.groups, 2 * case.width, case.hidden), jnp.bfloat16)
    op = "grouped_matmul" if product else PLAIN.get(case.op) or _QUANTIZERS[case.recipe]
    return explain(op, implementation=implementation, w=weights).chosen


def timed(
    cases: tuple[Case, ...],
    implementation: str | None,
    compare_xla: bool,
    stopwatch: Stopwatch,
    ceilings: dict[str, float],
) -> Iterator[Result]:
    """Results of cases that share an op and a recipe, so the experts too. `compare_xla`: time `xla` beside another."""
    one_kind = _products if cases[0].op in GEMMS else _elementwise
    return one_kind(cases, implementation, compare_xla, stopwatch, ceilings)


def _elementwise(
    cases: tuple[Case, ...],
    implementation: str | None,
    compare_xla: bool,
    stopwatch: Stopwatch,
    ceilings: dict[str, float],
) -> Iterator[Result]:
    chosen = choose(cases[0], implementation)
    for case in cases:
        rows = calls.make_rows(case)
        call = calls.elementwise_call(case, rows, chosen)
        xla_us = None
        if chosen != "xla" and compare_xla:
            xla_us = stopwatch.time(calls.elementwise_call(case, rows, "xla")).us
        yield Result(case, chosen, stopwatch.time(call), roof_us(case, ceilings), call.compile_s, xla_us=xla_us)


def _products(
    cases: tuple[Case, ...],
    implementation: str | None,
    compare_xla: bool,
    stopwatch: Stopwatch,
    ceilings: dict[str, float],
) -> Iterator[Result]:
    first = cases[0]
    experts = calls.make_experts(first)
    weights = calls.expert_weights(experts, first, implementation)
    chosen = explain("grouped_matmul", implementation=implementation, w=weights).chosen
    plain = calls.expert_weights(experts, first, "xla") if chosen != "xla" and compare_xla else None
    for case in cases:
        rows = calls.make_rows(case)
        x = calls.quantized_rows(case, rows)
        call = calls.product_call(case, x, weights, implementation=chosen)
        error = calls.relative_error(case, x, experts, call())
        timing, roof = stopwatch.time(call), roof_us(case, ceilings)
        from_bf16, quantized_out = _quantized(case, rows, x, weights, chosen, stopwatch)
        xla = None
        if plain is not None:
            xla_call = calls.product_call(case, x, plain, implementation="xla")
            xla = stopwatch.measure(xla_call, limit=XLA_LIMIT)
        xla_us = None if xla is None else xla.us
        yield Result(case, chosen, timing, roof, call.compile_s, error, from_bf16, quantized_out, xla_us)
    del experts, weights, plain
    gc.collect()


def _quantized(
    case: Case, rows: Any, x: Any, weights: Any, implementation: str, stopwatch: Stopwatch
) -> tuple[float | None, float | None]:
    """Microseconds of a quantised recipe's variants: from bfloat16 rows, and of w13 to quantised rows."""
    recipe = RECIPES[case.recipe]
    if recipe.quantize is None:
        return None, None
    product = functools.partial(calls.product_call, case, w=weights, implementation=implementation)
    from_bf16 = stopwatch.time(product(x=rows, quantize=True)).us
    if not case.gated:
        return from_bf16, None
    return from_bf16, stopwatch.time(product(x=x, out_format=recipe.row_format)).us
