"""Low-rank adapters on routed experts (LoRA), applied beside the frozen weights: `W x + scale * B (A x)`.

    gate_up = w13 x + scale * b13 (a13 x)        then rounded, activated and rounded as without them
    output  = w2 h + scale * b2 (a2 h)

One pair of matrices an expert, or one for all of them. `b` begins as zeros, so that a layer does not change by having
adapters. They are `nnx.Param`s: whatever trains a layer's unpacked weights trains them.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, BFloat16, Float, Int

from k3jax.config import K3Config
from k3jax.experts import RECIPES, HowToMultiply, Mlp, Weights
from k3jax.row_order import spread
from pallas_kernels import (
    KernelWeights,
    from_kernel_layout,
    grouped_matmul,
    low_rank_matmul,
    quantize_fp8_token,
)
from pallas_kernels.rounding import to_bfloat16
from pallas_kernels.situ import apply_activation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdapterArrays:
    """bfloat16 `a13 [G, R, L]`, `b13 [G, 2, F, R]`, `a2 [G, R, F]`, `b2 [G, L, R]`; G is E, or 1 for shared ones."""

    a13: Array
    b13: Array
    a2: Array
    b2: Array
    scale: float = dataclasses.field(metadata={"static": True})

    def of_rows(self, rows: Float[Array, "s l"], group_sizes: Int[Array, " e"]) -> Float[Array, "s two_f"]:
        """What is added to gate and up, float32 `[S, 2F]`, gate first."""
        b13 = self.b13.reshape(self.b13.shape[0], -1, self.b13.shape[-1])
        return self.scale * low_rank_matmul(rows, self.a13, b13, self._sizes(group_sizes))

    def of_hidden(self, hidden: BFloat16[Array, "s f"], group_sizes: Int[Array, " e"]) -> Float[Array, "s l"]:
        """What is added to the output, float32 `[S, L]`."""
        return self.scale * low_rank_matmul(hidden, self.a2, self.b2, self._sizes(group_sizes))

    def _sizes(self, group_sizes: Array) -> Array:
        """Of the adapters' groups: adapters that all experts share have one, of every routed row."""
        shared = self.a13.shape[0] == 1
        return jnp.sum(group_sizes, keepdims=True, dtype=group_sizes.dtype) if shared else group_sizes


class ExpertAdapters(nnx.Module):
    """The adapters of one layer.

    Args:
        config: of the layer. rank: R. scale: of what they add. shared: one pair for all experts.

    Raises:
        ValueError: the rank is not positive.
    """

    def __init__(self, config: K3Config, *, rank: int, scale: float, shared: bool, rngs: nnx.Rngs) -> None:
        if rank < 1:
            raise ValueError(f"adapters: {rank=} must be at least 1")
        assert config.num_experts is not None
        groups, axis = (1, None) if shared else (config.num_experts, "expert")
        latent, width = config.latent_size, config.expert_width

        def random(shape: tuple[int, ...]) -> Array:
            return (jax.random.normal(rngs.params(), shape) * shape[-1] ** -0.5).astype(jnp.bfloat16)

        self.scale = float(scale)
        self.a13 = nnx.Param(random((groups, rank, latent)), axes=(axis, None, "latent"))
        self.b13 = nnx.Param(jnp.zeros((groups, 2, width, rank), jnp.bfloat16), axes=(axis, None, "expert_ff", None))
        self.a2 = nnx.Param(random((groups, rank, width)), axes=(axis, None, "expert_ff"))
        self.b2 = nnx.Param(jnp.zeros((groups, latent, rank), jnp.bfloat16), axes=(axis, "latent", None))

    def expert_mlp(self) -> Mlp:
        """What `routed_experts` is to compute of its rows."""
        return functools.partial(adapted_expert_mlp, adapters=self.arrays())

    def arrays(self) -> AdapterArrays:
        """The matrices at hand."""
        return AdapterArrays(self.a13[...], self.b13[...], self.a2[...], self.b2[...], self.scale)


def adapted_expert_mlp(
    latent_TL: BFloat16[Array, "t l"],
    ids: Int[Array, "t x"],
    w13: Weights,
    w2: Weights,
    how: HowToMultiply,
    *,
    adapters: AdapterArrays,
) -> tuple[Float[Array, "s l"], Int[Array, "t x"]]:
    """`expert_mlp` with what adapters add before each rounding; they see rows that no recipe has quantised."""
    schedule, rows_SL = spread(latent_TL, ids, w13.shape[0])
    group_sizes = schedule.group_sizes
    gate_up = _product(rows_SL, w13, group_sizes, how) + adapters.of_rows(rows_SL, group_sizes)
    hidden_SF = apply_activation(how.activation, to_bfloat16(gate_up))
    sums = _product(hidden_SF, w2, group_sizes, how) + adapters.of_hidden(hidden_SF, group_sizes)
    return (sums if how.sums_format == "f32" else to_bfloat16(sums)), schedule.row


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(rows: Array, w: Weights, group_sizes: Array, how: HowToMultiply) -> Array:
    """`rows @ w[g].T` in float32, of rows in the recipe's format; the gradient is that without the quantiser."""
    return grouped_matmul(_quantized(rows, how), w, group_sizes, out_format="f32", implementation=how.implementation)


def _quantized(rows: Array, how: HowToMultiply) -> Any:
    if how.recipe == "w4a8_fp8":  # Hidden rows may be a part of a token's, whose scale is that of the whole.
        return quantize_fp8_token(rows, amax=how.ranks.widest(jnp.max(jnp.abs(rows), axis=-1, keepdims=True)))
    quantize = RECIPES[how.recipe].quantize
    return rows if quantize is None else quantize(rows)


def _product_forward(rows: Array, w: Weights, group_sizes: Array, how: HowToMultiply) -> tuple[Array, tuple[Any, ...]]:
    return _product(rows, w, group_sizes, how), (rows, w, group_sizes)


def _product_backward(how: HowToMultiply, residuals: tuple[Any, ...], dy: Array) -> tuple[Array, None, None]:
    rows, w, group_sizes = residuals
    implementation = how.implementation
    if isinstance(w, KernelWeights):
        w, implementation = from_kernel_layout(w), None
    product = functools.partial(grouped_matmul, out_format="f32", implementation=implementation)
    _, pullback = jax.vjp(lambda rows: product(rows, w, group_sizes), rows)
    return pullback(dy)[0], None, None


_product.defvjp(_product_forward, _product_backward)
