"""What of Mosaic's kernels for rows a CPU can show: under every transformation they have the formulas' shapes.

Their numbers are in test_row_kernels_gpu.py, their programs in tests/aot.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import Situ, quantize_fp8_token, quantize_mxfp8, rms_norm, situ_and_mul
from pallas_kernels.row_kernels import mosaic_rows

Function = Callable[[jax.Array], Any]
PAIRS: dict[str, tuple[Function, Function]] = {
    "situ": (
        lambda x: mosaic_rows.gated(Situ(4.0, 25.0), x),
        lambda x: situ_and_mul(x, beta=4.0, linear_beta=25.0, implementation="xla"),
    ),
    "blocks": (mosaic_rows.quantize_mxfp8, lambda x: quantize_mxfp8(x, implementation="xla")),
    "norm": (
        lambda x: mosaic_rows.rms_norm(1e-5, x.astype(jnp.float32), x.reshape(-1)[: x.shape[-1]]),
        lambda x: rms_norm(x.astype(jnp.float32), x.reshape(-1)[: x.shape[-1]], eps=1e-5, implementation="xla"),
    ),
    "tokens": (mosaic_rows.quantize_fp8_token, lambda x: quantize_fp8_token(x, implementation="xla")),
}


def total(function: Function) -> Function:
    def call(x: jax.Array) -> jax.Array:
        y = function(x)
        return jnp.sum(y.astype(jnp.float32) if isinstance(y, jax.Array) else y.dequantize(jnp.float32))

    return call


TRANSFORMATIONS: dict[str, Callable[[Function], Function]] = {
    "plain": lambda f: f,
    "vmap": lambda f: jax.vmap(f, in_axes=1, out_axes=1),
    "vmap twice": lambda f: jax.vmap(jax.vmap(f)),
    "grad": lambda f: jax.grad(total(f)),
    "grad of vmap": lambda f: jax.grad(total(jax.vmap(f))),
    "vmap of grad": lambda f: jax.vmap(jax.grad(total(f))),
}


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("op", PAIRS)
def test_transformed_kernels_have_the_shapes_of_transformed_formulas(op: str, transformation: str) -> None:
    x = jax.ShapeDtypeStruct((3, 5, 64), jnp.bfloat16)
    got, expected = (jax.eval_shape(TRANSFORMATIONS[transformation](f), x) for f in PAIRS[op])
    assert got == expected


def test_situ_has_tangents() -> None:
    x = jax.ShapeDtypeStruct((2, 64), jnp.bfloat16)
    got, expected = (jax.eval_shape(lambda x, f=f: jax.jvp(f, (x,), (x,)), x) for f in PAIRS["situ"])
    assert got == expected
