"""`MoE`: Kimi K3's mixture-of-experts layer. Read `trace` top to bottom: it is the way of the data.

x [T, D] -- router --> ids, weights [T, X]
x [T, D] -- latent down-projection --> [T, L] -- routed experts, weighted sum --> [T, L]
         -- RMSNorm -- latent up-projection --> [T, D]   + shared experts (x)   = output [T, D]
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, BFloat16, Bool, Float

from k3jax.adapters import ExpertAdapters
from k3jax.config import K3Config
from k3jax.exchange import exchange
from k3jax.experts import RECIPES, FrozenExperts, HowToMultiply, Weights, gate_and_up_rows
from k3jax.kernel_placement import lay_out_experts
from k3jax.linear import Weight, weight_variable
from k3jax.mlp import GatedMLP, check_tokens
from k3jax.moe_arrays import MoEArrays, check_arrays
from k3jax.moe_shapes import AXES, local_shapes
from k3jax.options import DEFAULTS, LoadOptions
from k3jax.parameters import parameter_specs, place_parameters
from k3jax.routing import Router, Routing, pick_experts
from pallas_kernels import Activation, dense_matmul, grouped_matmul, lay_out, quantize_mxfp4, rms_norm, select
from pallas_kernels.rounding import to_bfloat16
from sharding import Layout, Travel, choose_transport, in_chunks, make_layout


class MoE(nnx.Module):
    """One mixture-of-experts layer; callable on `[..., D]`, under `jit`, `vmap`, `grad`, `checkpoint` and `export`.

    Args:
        config: sizes and switches. recipe: "bf16", "w4a16", "w4a8" or "w4a8_fp8".
        implementation: of `grouped_matmul`; None for the fastest that runs here.
        arrays: the weights; or `rngs`, for random ones. Exactly one of the two.
        mesh: runs the layer over it. Calls take and give global arrays.
        tokens: with a mesh, "replicated" or "sharded"; see `load_layer`. options: see `LoadOptions`.

    Raises:
        ValueError: the config has no experts, an argument is unknown, an array has the wrong shape or dtype, or the
            mesh cannot split the layer.
        NotImplementedError: the named implementation cannot run here.
    """

    def __init__(
        self,
        config: K3Config,
        *,
        recipe: str = "w4a16",
        implementation: str | None = None,
        arrays: MoEArrays | None = None,
        rngs: nnx.Rngs | None = None,
        mesh: Mesh | None = None,
        tokens: str = "replicated",
        options: LoadOptions = DEFAULTS,
    ) -> None:
        if config.num_experts is None:
            raise ValueError("MoE: the config has no num_experts; build a GatedMLP")
        if recipe not in RECIPES:
            raise ValueError(f"MoE: {recipe=} is not one of {', '.join(RECIPES)}")
        if (arrays is None) == (rngs is None):
            raise ValueError("MoE: pass either arrays= or rngs=, for given or for random weights")
        self.layout = moe_layout(config, recipe, mesh, tokens, options)
        if rngs is not None:
            arrays = MoEArrays.random(config, packed=RECIPES[recipe].packed, rngs=rngs)
        assert arrays is not None
        check_arrays(config, arrays, packed=RECIPES[recipe].packed)
        self.config = config
        self.recipe = recipe
        self.implementation = implementation
        self.max_tokens = options.max_tokens
        self.router = Router(arrays.router_weight, arrays.router_bias)
        self.latent_down = _param(arrays, "latent_down")
        self.latent_norm = _param(arrays, "latent_norm")
        self.latent_up = _param(arrays, "latent_up")
        self.shared = _shared_experts(arrays, config.activation)
        self.w13 = FrozenExperts(arrays.w13, axes=AXES["w13"])
        self.w2 = FrozenExperts(arrays.w2, axes=AXES["w2"])
        self.adapters: ExpertAdapters | None = nnx.data(None)  # k3jax.merging.add_adapters
        place_parameters(self, self.layout)
        place = functools.partial(
            lay_out, recipe=recipe, implementation=implementation, allow_inexact=options.allow_inexact
        )
        lay_out_experts(self.w13, self.w2, self.layout, place)
        for experts in (self.w13, self.w2):  # raises now, not at the first call
            select.explain("grouped_matmul", implementation=implementation, w=experts.get_value())

    def __call__(self, x: Float[Array, "... d"], mask: Bool[Array, "..."] | None = None) -> Float[Array, "... d"]:
        """`[..., D] -> [..., D]` in the dtype of `x` (bfloat16, float16 or float32).

        The router reads `x` as it is; everything else works on `x` rounded to bfloat16. Tokens whose bool `mask [...]`
        is False are routed to no expert and only get the shared experts' output.
        """
        return self.layout.unflat(self.trace(x, mask)["output"], x)

    def trace(self, x: Float[Array, "... d"], mask: Bool[Array, "..."] | None = None) -> dict[str, Array]:
        """Every stage of the layer over flattened tokens, in order; a part that the layer lacks has no entry.

        router_logits `[T, E]` float32, expert_ids `[T, X]` int32, expert_weights `[T, X]` float32, latent `[T, L]`,
        expert_sum `[T, L]`, normed_latent `[T, L]`, shared `[T, D]`, all bfloat16, and output `[T, D]` in `x`'s dtype.
        """
        check_tokens(x, mask, self.config.hidden_size)
        return self._run(MoE._stages, self.layout.flat(x, 1), mask)

    def _stages(self, x_TD: Array, mask: Array | None) -> dict[str, Array]:
        """One rank's `trace`: of its tokens, with its parameters."""
        ranks = self.layout.ranks
        stages = {"router_logits": self.router.logits(x_TD)}
        routing = self._pick(stages["router_logits"], mask)
        stages |= {"expert_ids": routing.ids, "expert_weights": routing.weights}

        dtype, x_TD = x_TD.dtype, to_bfloat16(x_TD)
        if self.latent_down is not None:
            stages["latent"] = self._latent(x_TD)
        rows_TL = stages.get("latent", x_TD)
        y = self._experts(rows_TL, routing)
        shared = None
        if self.shared is not None:
            shared = self.shared.project(ranks.after(rows_TL, ranks.gather(x_TD)), ranks.splits_mlp)
        sums, shared = ranks.total(y, shared)
        y = stages["expert_sum"] = to_bfloat16(sums)
        if self.latent_norm is not None:
            y = stages["normed_latent"] = rms_norm(sums, self.latent_norm[...], eps=self.config.rms_norm_eps)
        if shared is not None:
            shared = stages["shared"] = to_bfloat16(shared)
        if self.latent_up is not None and ranks.alone:
            y = dense_matmul(y, self.latent_up.get_value(), addend=shared)
        else:
            if self.latent_up is not None:  # over a mesh it runs while the shared experts, or a sum of theirs, still do
                y = dense_matmul(y, self.latent_up.get_value())
            if shared is not None:
                y = to_bfloat16(y.astype(jnp.float32) + shared.astype(jnp.float32))
        stages["output"] = y.astype(dtype)
        return stages

    def route(self, x: Float[Array, "... d"], mask: Bool[Array, "..."] | None = None) -> Routing:
        """The picks alone: `[..., D] -> Routing` over flattened tokens; ids are -1 where `mask` is False."""
        check_tokens(x, mask, self.config.hidden_size)
        return self._run(MoE._route, self.layout.flat(x, 1), mask)

    def _route(self, x_TD: Array, mask: Array | None) -> Routing:
        return self._pick(self.router.logits(x_TD), mask)

    def routed(
        self, x: Float[Array, "... d"], routing: Routing, dtype: jax.typing.DTypeLike = jnp.bfloat16
    ) -> Float[Array, "t l"]:
        """The experts' weighted sum for given picks, before the norm: `[..., D] -> [T, L]` (D without a latent).

        Rounded to bfloat16 as in the layer, or as the sum is with `dtype=jnp.float32`.
        """
        check_tokens(x, None, self.config.hidden_size)
        sums_TL = self.layout.run(MoE._routed, parameter_specs, self, self.layout.flat(x, 1), *routing)
        return to_bfloat16(sums_TL) if dtype == jnp.bfloat16 else sums_TL.astype(dtype)

    def _routed(self, x_TD: Array, ids: Array, weights: Array) -> Array:
        x_TD = to_bfloat16(x_TD)
        latent_TL = x_TD if self.latent_down is None else self._latent(x_TD)
        (sums_TL,) = self.layout.ranks.total(self._experts(latent_TL, Routing(ids, weights)))
        return sums_TL

    def activation_probe(self, gate: BFloat16[Array, " p"], up: BFloat16[Array, " p"]) -> BFloat16[Array, " p"]:
        """This layer's fused activation on given gate and up, `[P], [P] -> [P]`: an identity matrix as the expert."""
        block = 64  # an identity of 128 x 128, which every implementation can take
        padding = (0, -gate.size % block)
        gate_up = jnp.concatenate([jnp.pad(v, padding).reshape(-1, block) for v in (gate, up)], axis=1)
        y = grouped_matmul(
            gate_up,
            self._identity(2 * block),
            jnp.array([gate_up.shape[0]], jnp.int32),
            activation=self.config.activation,
            implementation=self.implementation,
        )
        return y.reshape(-1)[: gate.size]

    def _identity(self, size: int) -> Weights:
        """`[1, size, size]` in the form of this layer's experts, for rows in bfloat16."""
        with jax.ensure_compile_time_eval():  # a layout is chosen by looking at the values
            identity = jnp.eye(size, dtype=jnp.bfloat16)[None]
            if not RECIPES[self.recipe].packed:
                return identity
            return lay_out(quantize_mxfp4(identity), recipe="w4a16", gated=True, implementation=self.implementation)

    def _run(self, body: Callable[..., Any], x_TD: Array, mask: Array | None) -> Any:
        """`body(self, x, mask)` on every rank. Tokens added to share them evenly are masked."""
        layout = self.layout
        if mask is not None:
            mask = layout.flat(mask, 0)
        elif layout.adds_tokens(x_TD.shape[0]):
            mask = jnp.ones(x_TD.shape[0], jnp.bool_)
        return layout.run(body, parameter_specs, self, x_TD, mask)

    def _pick(self, logits_TE: Array, mask: Array | None) -> Routing:
        return pick_experts(logits_TE, self.router.bias[...], self.config, mask)

    def _latent(self, x_TD: Array) -> Array:
        assert self.latent_down is not None
        return latents(x_TD, self.latent_down.get_value())

    def _experts(self, latent_TL: Array, routing: Routing) -> Array:
        """The routed experts' sums in float32 for this rank's tokens; with replicated tokens its part of them."""
        ranks, w13, w2 = self.layout.ranks, gate_and_up_rows(self.w13.get_value()), self.w2.get_value()
        how = HowToMultiply(self.config.activation, self.recipe, self.implementation, ranks)
        mlp = None if self.adapters is None else self.adapters.expert_mlp()
        most = self.max_tokens and max(self.max_tokens // ranks.meeting, 1)

        def one_chunk(latent_TL: Array, ids: Array, weights: Array) -> Array:
            return exchange(latent_TL, Routing(ids, weights), w13, w2, how, mlp)

        return in_chunks(one_chunk, most, latent_TL, *routing)


def latents(x_TD: BFloat16[Array, "t d"], latent_down: Weight) -> BFloat16[Array, "t l"]:
    """What the routed experts see of tokens, `[T, D] -> [T, L]`: all that they add is off by what this is off by."""
    return dense_matmul(x_TD, latent_down, fine_sums=True)


def _param(arrays: MoEArrays, name: str) -> nnx.Variable | None:
    array = getattr(arrays, name)
    return None if array is None else weight_variable(array, AXES[name])


def _shared_experts(arrays: MoEArrays, activation: Activation) -> GatedMLP | None:
    if arrays.shared_gate_up is None or arrays.shared_down is None:
        return None
    return GatedMLP(arrays.shared_gate_up, arrays.shared_down, activation=activation, width_axis="shared_ff")


def moe_layout(config: K3Config, recipe: str, mesh: Mesh | None, tokens: str, options: LoadOptions) -> Layout:
    """The layout of an MoE layer.

    Raises:
        ValueError: the mesh or an option is wrong, or something cannot be split evenly over that mesh.
    """
    assert config.num_experts is not None

    def with_transport(name: str | None) -> Layout:
        travel = Travel(options.wire, name, RECIPES[recipe].quantize)
        return make_layout(mesh, tokens, travel, split_shared=options.split_shared)

    layout = with_transport(options.transport)
    local_shapes(config, layout.sizes, layout.rules, packed=RECIPES[recipe].packed)
    if tokens == "replicated" or options.transport is not None:
        return layout
    picks, node = config.experts_per_token, options.gpus_per_node
    return with_transport(choose_transport(layout.sizes.expert, config.num_experts, picks, node))
