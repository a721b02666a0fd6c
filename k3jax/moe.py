"""`MoE`: Kimi K3's mixture-of-experts layer. Read `trace` top to bottom: it is the way of the data.

x [T, D] -- router --> ids, weights [T, X]
x [T, D] -- latent down-projection --> [T, L] -- routed experts, weighted sum --> [T, L]
         -- RMSNorm -- latent up-projection --> [T, D]   + shared experts (x)   = output [T, D]
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, BFloat16, Bool, Float

from k3jax.config import K3Config
from k3jax.experts import RECIPES, FrozenExperts, Weights, routed_experts
from k3jax.linear import linear, rms_norm
from k3jax.mlp import GatedMLP, check_tokens, random_weight
from k3jax.routing import Router, Routing, pick_experts
from pallas_kernels import Activation, KernelWeights, MXFP4Array, grouped_matmul, lay_out, quantize_mxfp4, select
from pallas_kernels.rounding import to_bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEArrays:
    """An MoE layer's weights, (out, in) as checkpoints store them: bfloat16 but for the router's float32 bias.

    Attributes:
        router_weight: `[E, D]`. router_bias: float32 `[E]`.
        latent_down: `[L, D]`, latent_up: `[D, L]`: both, or None where experts work on D itself.
        latent_norm: `[L]`, or None.
        shared_gate_up: `[2Fs, D]`, gate rows first, shared_down: `[D, Fs]`: both, or None without shared experts.
        w13: `[E, 2F, L]`, gate (w1) rows first, and w2: `[E, L, F]`: MXFP4Array, or bfloat16 for recipe "bf16".
    """

    router_weight: Array
    router_bias: Array
    latent_down: Array | None = None
    latent_norm: Array | None = None
    latent_up: Array | None = None
    shared_gate_up: Array | None = None
    shared_down: Array | None = None
    w13: Weights
    w2: Weights

    @classmethod
    def random(cls, config: K3Config, *, packed: bool, rngs: nnx.Rngs) -> "MoEArrays":
        """Random weights of variance 1 / fan-in; experts in MXFP4 when `packed`."""
        hidden, latent, shared = config.hidden_size, config.latent_size, config.shared_intermediate_size
        num_experts, width = config.num_experts, config.expert_width
        assert num_experts is not None, "the config has no experts"
        has_latent = config.routed_expert_hidden_size is not None

        def experts(rows: int, columns: int) -> Weights:
            w = random_weight(rngs, (num_experts, rows, columns))
            return quantize_mxfp4(w) if packed else w

        return cls(
            router_weight=random_weight(rngs, (num_experts, hidden)),
            router_bias=jnp.zeros(num_experts, jnp.float32),
            latent_down=random_weight(rngs, (latent, hidden)) if has_latent else None,
            latent_norm=jnp.ones(latent, jnp.bfloat16) if config.latent_moe_use_norm else None,
            latent_up=random_weight(rngs, (hidden, latent)) if has_latent else None,
            shared_gate_up=random_weight(rngs, (2 * shared, hidden)) if shared else None,
            shared_down=random_weight(rngs, (hidden, shared)) if shared else None,
            w13=experts(2 * width, latent),
            w2=experts(latent, width),
        )


class MoE(nnx.Module):
    """One mixture-of-experts layer; callable on `[..., D]`, under `jit`, `vmap`, `grad`, `checkpoint` and `export`.

    Args:
        config: sizes and switches. recipe: "bf16", "w4a16", "w4a8" or "w4a8_fp8".
        implementation: of `grouped_matmul`; None for the fastest that runs here.
        allow_inexact: let that implementation round experts whose exponents span more than it can hold (it warns).
        arrays: the weights; or `rngs`, for random ones. Exactly one of the two.

    Raises:
        ValueError: the config has no experts, an argument is unknown, or an array has the wrong shape or dtype.
        NotImplementedError: the named implementation cannot run here.
    """

    def __init__(
        self,
        config: K3Config,
        *,
        recipe: str = "w4a16",
        implementation: str | None = None,
        allow_inexact: bool = False,
        arrays: MoEArrays | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        if config.num_experts is None:
            raise ValueError("MoE: the config has no num_experts; build a GatedMLP")
        if recipe not in RECIPES:
            raise ValueError(f"MoE: {recipe=} is not one of {', '.join(RECIPES)}")
        if (arrays is None) == (rngs is None):
            raise ValueError("MoE: pass either arrays= or rngs=, for given or for random weights")
        if rngs is not None:
            arrays = MoEArrays.random(config, packed=RECIPES[recipe].packed, rngs=rngs)
        assert arrays is not None
        _check_arrays(config, recipe, arrays)
        place = functools.partial(lay_out, recipe=recipe, implementation=implementation, allow_inexact=allow_inexact)
        w13, w2 = place(arrays.w13, gated=True), place(arrays.w2, gated=False)
        for w in (w13, w2):
            select.explain("grouped_matmul", implementation=implementation, w=w)  # raises now, not at the first call
        self.config = config
        self.recipe = recipe
        self.implementation = implementation
        self.router = Router(arrays.router_weight, arrays.router_bias)
        self.latent_down = _param(arrays.latent_down)
        self.latent_norm = _param(arrays.latent_norm)
        self.latent_up = _param(arrays.latent_up)
        self.shared = _shared_experts(arrays, config.activation)
        self.w13 = FrozenExperts(w13)
        self.w2 = FrozenExperts(w2)

    def __call__(self, x: Float[Array, "... d"], mask: Bool[Array, "..."] | None = None) -> Float[Array, "... d"]:
        """`[..., D] -> [..., D]` in the dtype of `x` (bfloat16, float16 or float32).

        The router reads `x` as it is; everything else works on `x` rounded to bfloat16. Tokens whose bool `mask [...]`
        is False are routed to no expert and only get the shared experts' output.
        """
        return self.trace(x, mask)["output"].reshape(x.shape)

    def trace(self, x: Float[Array, "... d"], mask: Bool[Array, "..."] | None = None) -> dict[str, Array]:
        """Every stage of the layer over flattened tokens, in order; a part that the layer lacks has no entry.

        router_logits `[T, E]` float32, expert_ids `[T, X]` int32, expert_weights `[T, X]` float32, latent `[T, L]`,
        expert_sum `[T, L]`, normed_latent `[T, L]`, shared `[T, D]`, all bfloat16, and output `[T, D]` in `x`'s dtype.
        """
        check_tokens(x, mask, self.config.hidden_size)
        x_TD = x.reshape(-1, x.shape[-1])
        stages = {"router_logits": self.router.logits(x_TD)}
        routing = self._pick(stages["router_logits"], mask)
        stages |= {"expert_ids": routing.ids, "expert_weights": routing.weights}

        x_TD = to_bfloat16(x_TD)
        if self.latent_down is not None:
            stages["latent"] = linear(x_TD, self.latent_down[...])
        y = stages["expert_sum"] = self._experts(stages.get("latent", x_TD), routing)
        if self.latent_norm is not None:
            y = stages["normed_latent"] = rms_norm(y, self.latent_norm[...], self.config.rms_norm_eps)
        if self.latent_up is not None:
            y = linear(y, self.latent_up[...])
        if self.shared is not None:
            stages["shared"] = self.shared.project(x_TD)
            y = to_bfloat16(y.astype(jnp.float32) + stages["shared"].astype(jnp.float32))
        stages["output"] = y.astype(x.dtype)
        return stages

    def route(self, x: Float[Array, "... d"], mask: Bool[Array, "..."] | None = None) -> Routing:
        """The picks alone: `[..., D] -> Routing` over flattened tokens; ids are -1 where `mask` is False."""
        check_tokens(x, mask, self.config.hidden_size)
        return self._pick(self.router.logits(x.reshape(-1, x.shape[-1])), mask)

    def routed(self, x: Float[Array, "... d"], routing: Routing) -> BFloat16[Array, "t l"]:
        """The experts' weighted sum for given picks, before the norm: `[..., D] -> [T, L]` (D without a latent)."""
        check_tokens(x, None, self.config.hidden_size)
        x_TD = to_bfloat16(x.reshape(-1, x.shape[-1]))
        latent_TL = x_TD if self.latent_down is None else linear(x_TD, self.latent_down[...])
        return self._experts(latent_TL, routing)

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

    def _pick(self, logits_TE: Array, mask: Array | None) -> Routing:
        return pick_experts(logits_TE, self.router.bias[...], self.config, None if mask is None else mask.reshape(-1))

    def _experts(self, latent_TL: Array, routing: Routing) -> Array:
        return routed_experts(
            latent_TL,
            routing,
            self.w13.get_value(),
            self.w2.get_value(),
            activation=self.config.activation,
            recipe=self.recipe,
            implementation=self.implementation,
        )


def _param(array: Array | None) -> nnx.Param | None:
    return None if array is None else nnx.Param(array)


def _shared_experts(arrays: MoEArrays, activation: Activation) -> GatedMLP | None:
    if arrays.shared_gate_up is None or arrays.shared_down is None:
        return None
    return GatedMLP(arrays.shared_gate_up, arrays.shared_down, activation=activation)


def _check_arrays(config: K3Config, recipe: str, arrays: MoEArrays) -> None:
    """Raises ValueError unless every array is there exactly when the config says so, in its shape and dtype."""
    hidden, latent, shared, width = (
        config.hidden_size,
        config.latent_size,
        config.shared_intermediate_size,
        config.expert_width,
    )
    has_latent = config.routed_expert_hidden_size is not None
    expected = {
        "latent_down": (latent, hidden) if has_latent else None,
        "latent_norm": (latent,) if config.latent_moe_use_norm else None,
        "latent_up": (hidden, latent) if has_latent else None,
        "shared_gate_up": (2 * shared, hidden) if shared else None,
        "shared_down": (hidden, shared) if shared else None,
        "router_weight": (config.num_experts, hidden),
        "router_bias": (config.num_experts,),
        "w13": (config.num_experts, 2 * width, latent),
        "w2": (config.num_experts, latent, width),
    }
    for name, shape in expected.items():
        array = getattr(arrays, name)
        found = None if array is None else tuple(array.shape)
        if found != shape:
            raise ValueError(f"MoE: {name} has shape {found}, but the config asks for {shape}")
        if isinstance(array, MXFP4Array | KernelWeights) or name == "router_bias" or array is None:
            continue
        if array.dtype != jnp.bfloat16:
            raise ValueError(f"MoE: {name} must be bfloat16, not {array.dtype}")
    for name in ("w13", "w2"):
        if isinstance(getattr(arrays, name), MXFP4Array | KernelWeights) != RECIPES[recipe].packed:
            wanted = "an MXFP4Array" if RECIPES[recipe].packed else "a bfloat16 array (MXFP4Array.dequantize gives one)"
            raise ValueError(f"MoE: {name} must be {wanted} for {recipe=}")
