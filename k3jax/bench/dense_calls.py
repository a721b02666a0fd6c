"""The weight and the calls behind a dense row of `k3jax bench`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16

from k3jax.bench.calls import CHECKED_ROWS, KIMI, Program, compiled, normal_weight, product_error
from k3jax.bench.dense_cases import DenseCase
from pallas_kernels import dense_matmul


def make_weight(case: DenseCase) -> BFloat16[Array, "columns depth"]:
    """Normal values of variance 1 / depth, so that products with unit-normal rows are unit-normal too."""
    return normal_weight(jax.random.key(case.seed), case.weight)


def dense_call(case: DenseCase, x: Array, w: Array, implementation: str) -> Program:
    """The op, compiled as one program."""
    activation = KIMI if case.gated else None
    return compiled(functools.partial(dense_matmul, activation=activation, implementation=implementation), x, w)


def dot_call(x: Array, w: Array) -> Program:
    """The bare product to bfloat16, without an activation."""
    return compiled(lambda x, w: jnp.dot(x, w.T), x, w)


def relative_error(case: DenseCase, x: Array, w: Array, y: Array) -> float:
    """Relative L2 of some rows, from the first to the last, against the product in float32."""
    rows = np.linspace(0, case.rows - 1, min(case.rows, CHECKED_ROWS)).astype(np.int32)
    return float(_relative_error(x[rows], w, y[rows], gated=case.gated))


@functools.partial(jax.jit, static_argnames=("gated",))
def _relative_error(x: Array, w: Array, y: Array, *, gated: bool) -> Array:
    return product_error(x.astype(jnp.float32), w.astype(jnp.float32), y, gated)
