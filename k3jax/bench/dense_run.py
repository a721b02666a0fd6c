"""The figures of `k3jax bench` for the dense products of a layer."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array

from k3jax.bench import calls, dense_calls
from k3jax.bench.dense_cases import DenseCase
from k3jax.bench.results import Result, roof_us
from k3jax.bench.timing import Stopwatch
from pallas_kernels import explain


def choose(case: DenseCase, implementation: str | None) -> str:
    """The implementation that would run a case.

    Raises:
        NotImplementedError: the named implementation cannot run it.
    """
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((case.rows, case.depth), case.weight))
    activation = calls.KIMI if case.gated else None
    return explain("dense_matmul", implementation=implementation, x=x, w=w, activation=activation).chosen


def timed(
    cases: tuple[DenseCase, ...],
    implementation: str | None,
    compare_xla: bool,
    stopwatch: Stopwatch,
    ceilings: dict[str, float],
) -> Iterator[Result]:
    """Results of cases that share an op, so its weight too. With `compare_xla` XLA's products are timed beside."""
    w = dense_calls.make_weight(cases[0])
    for case in cases:
        yield _result(case, w, choose(case, implementation), compare_xla, stopwatch, ceilings)


def _result(
    case: DenseCase,
    w: Array,
    implementation: str,
    compare_xla: bool,
    stopwatch: Stopwatch,
    ceilings: dict[str, float],
) -> Result:
    x = calls.make_rows(case)
    call = dense_calls.dense_call(case, x, w, implementation)
    error = dense_calls.relative_error(case, x, w, call())
    timing = stopwatch.time(call)
    xla_us = dot_us = None
    if compare_xla:
        dot_us = stopwatch.time(dense_calls.dot_call(x, w)).us
        if implementation != "xla":
            xla_us = stopwatch.time(dense_calls.dense_call(case, x, w, "xla")).us
    roof = roof_us(case, ceilings)
    return Result(case, implementation, timing, roof, call.compile_s, error, xla_us=xla_us, dot_us=dot_us)
