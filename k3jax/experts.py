"""The routed experts: rows sorted by expert, two grouped GEMMs, and the weighted sum back to tokens.

rows   [S, L]  one a (token, slot), sorted by expert; S = T * X, masked slots last; quantised as its token is
hidden [S, F]  grouped_matmul(rows, w13, activation)
rows   [S, L]  grouped_matmul(hidden, w2)
latent [T, L]  sum over a token's slots of weight * row, in float32, in slot order
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, BFloat16, Float, Int

from k3jax.routing import Routing
from k3jax.row_order import spread
from pallas_kernels import (
    Activation,
    KernelWeights,
    MXFP4Array,
    MXFP8Array,
    TokenScaledArray,
    combine_rows,
    from_kernel_layout,
    grouped_matmul,
    quantize_fp8_token,
    quantize_mxfp8,
    spread_rows,
)
from sharding import Ranks

Weights = Array | MXFP4Array | KernelWeights


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the experts' numbers are kept: `packed` weights stay MXFP4; rows are in `row_format` before each GEMM, which
    `quantize` brings them into."""

    packed: bool
    quantize: Callable[[Array], MXFP8Array | TokenScaledArray] | None
    row_format: str


RECIPES = {
    "bf16": Recipe(packed=False, quantize=None, row_format="bf16"),
    "w4a16": Recipe(packed=True, quantize=None, row_format="bf16"),
    "w4a8": Recipe(packed=True, quantize=quantize_mxfp8, row_format="mxfp8"),
    "w4a8_fp8": Recipe(packed=True, quantize=quantize_fp8_token, row_format="fp8_token"),
}


class FrozenExperts(nnx.Variable):
    """The experts' weights. Not an `nnx.Param`: nothing trains or casts them."""


@dataclasses.dataclass(frozen=True)
class HowToMultiply:
    """What is fixed when the experts' GEMMs are compiled."""

    activation: Activation
    recipe: str
    implementation: str | None
    ranks: Ranks

    @property
    def hidden_format(self) -> str:
        """Of the rows between the GEMMs. A scale a token needs the whole token, which a part of F is not."""
        if self.ranks.splits_width and self.recipe == "w4a8_fp8":
            return "bf16"
        return RECIPES[self.recipe].row_format

    @property
    def sums_format(self) -> Literal["bf16", "f32"]:
        """Of the second GEMM's result, which is rounded once it is complete."""
        return "f32" if self.ranks.splits_width else "bf16"


Mlp = Callable[[Array, Array, Weights, Weights, HowToMultiply], tuple[Array, Array]]
"""Tokens `[T, L]`, their experts' ids `[T, X]`, w13 and w2 to rows `[S, L]`, and which row each slot's is, `[T, X]`."""


def routed_experts(
    latent_TL: BFloat16[Array, "t l"],
    routing: Routing,
    w13: Weights,
    w2: Weights,
    how: HowToMultiply,
    mlp: Mlp | None = None,
) -> Float[Array, "t l"]:
    """`sum_k weights[:, k] * expert[ids[:, k]](latent)`: `[T, L] -> [T, L]` float32, before it is rounded.

    For `w13 [E, 2F, L]` and `w2 [E, L, F]`; where ranks split F it is this rank's part of the sum. A slot with id -1
    contributes nothing; an id that a token names twice counts twice. No row is ever dropped. `mlp` is what is computed
    of each token's rows, `expert_mlp` by default.
    """
    rows_SL, positions = (mlp or expert_mlp)(latent_TL, routing.ids, w13, w2, how)
    return combine_rows(rows_SL, positions, routing.weights)


def gate_and_up_rows(w13: Weights) -> Weights:
    """`[E, 2, F, L] -> [E, 2F, L]`, as `grouped_matmul` takes them; a kernel's layout has such rows already."""
    if isinstance(w13, KernelWeights):
        return w13

    def rows(leaf: Array) -> Array:
        return leaf.reshape(leaf.shape[0], -1, leaf.shape[-1])

    if isinstance(jax.tree.leaves(w13)[0], jax.ShapeDtypeStruct):
        return jax.eval_shape(functools.partial(jax.tree.map, rows), w13)
    return jax.tree.map(rows, w13)


def expert_mlp(
    latent_TL: BFloat16[Array, "t l"], ids: Int[Array, "t x"], w13: Weights, w2: Weights, how: HowToMultiply
) -> tuple[Float[Array, "s l"], Int[Array, "t x"]]:
    """`w2 @ activation(w13 @ row)` of each row's expert, `[T, L] -> [S, L]`, with the recipe's quantised activations;
    and the row of each slot, -1 where it has none.

    bfloat16, or where F is split a part of a sum in float32, to be rounded after it. A row is quantised as its token
    is. The gradient passes straight through the quantisers: it is that of the same chain without.
    """
    return (_plain_mlp if RECIPES[how.recipe].quantize is None else _quantized_mlp)(latent_TL, ids, w13, w2, how)


def _plain_mlp(latent_TL: Array, ids: Array, w13: Weights, w2: Weights, how: HowToMultiply) -> tuple[Array, Array]:
    schedule, rows_SL = spread(latent_TL, ids, w13.shape[0])
    product = functools.partial(grouped_matmul, group_sizes=schedule.group_sizes, implementation=how.implementation)
    hidden_SF = product(rows_SL, w13, activation=how.activation)
    return product(hidden_SF, w2, out_format=how.sums_format), schedule.row


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _quantized_mlp(latent_TL: Array, ids: Array, w13: Weights, w2: Weights, how: HowToMultiply) -> tuple[Array, Array]:
    schedule, rows_SL = spread_rows(latent_TL, ids, w13.shape[0], out_format=RECIPES[how.recipe].row_format)
    product = functools.partial(grouped_matmul, group_sizes=schedule.group_sizes, implementation=how.implementation)
    hidden_SF = product(rows_SL, w13, activation=how.activation, out_format=how.hidden_format)
    if isinstance(hidden_SF, jax.Array):
        amax = how.ranks.widest(jnp.max(jnp.abs(hidden_SF), axis=-1, keepdims=True))
        hidden_SF = quantize_fp8_token(hidden_SF, amax=amax)
    return product(hidden_SF, w2, out_format=how.sums_format), schedule.row


def _quantized_mlp_forward(*arguments: Any) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
    return _quantized_mlp(*arguments), arguments[:4]


def _quantized_mlp_backward(
    how: HowToMultiply, residuals: tuple[Any, ...], d_results: tuple[Array, Any]
) -> tuple[Array, None, None, None]:
    latent_TL, ids, w13, w2 = residuals
    if isinstance(w13, KernelWeights) or isinstance(w2, KernelWeights):
        # Laid out for quantised rows, which the straight-through chain does not have.
        w13, w2 = (from_kernel_layout(w) if isinstance(w, KernelWeights) else w for w in (w13, w2))
        how = dataclasses.replace(how, implementation=None)

    _, pullback, _ = jax.vjp(lambda latent_TL: _plain_mlp(latent_TL, ids, w13, w2, how), latent_TL, has_aux=True)
    (d_latent,) = pullback(d_results[0])
    return d_latent, None, None, None


_quantized_mlp.defvjp(_quantized_mlp_forward, _quantized_mlp_backward)
