"""Layers with one planted fault each: what `compare` must find."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from k3jax.experts import FrozenExperts
from k3jax.moe import MoE
from k3jax.routing import Router, Routing, pick_experts
from pallas_kernels import MXFP4Array, Situ, SwiGLU

Mutation = Callable[[MoE], None]
DOUBLED = 5
"""The expert that `double_an_expert` doubles."""


class RoundedRouter(Router):
    """A router whose logits are rounded to bfloat16."""

    def logits(self, x: Float[Array, "t d"]) -> Float[Array, "t e"]:
        return super().logits(x).astype(jnp.bfloat16).astype(jnp.float32)


class RoundedInputRouter(Router):
    """A router that reads its input rounded to bfloat16."""

    def logits(self, x: Float[Array, "t d"]) -> Float[Array, "t e"]:
        return super().logits(x.astype(jnp.bfloat16))


class RoundedBiasMoE(MoE):
    """A layer that holds the bias in float32, and rounds it when it picks."""

    def _pick(self, logits_TE: Array, mask: Array | None) -> Routing:
        bias = self.router.bias[...].astype(jnp.bfloat16).astype(jnp.float32)
        return pick_experts(logits_TE, bias, self.config, mask)


def swap_gate_and_up(layer: MoE) -> None:
    half = layer.w13.get_value().shape[1] // 2
    _edit_packed(layer.w13, lambda codes: jnp.roll(codes, half, axis=1), lambda scales: jnp.roll(scales, half, axis=1))


def swap_shared_halves(layer: MoE) -> None:
    assert layer.shared is not None
    weight = layer.shared.gate_up
    weight.set_value(jnp.roll(weight[...], weight.shape[0] // 2, axis=0))


def swiglu_for_situ(layer: MoE) -> None:
    layer.config = dataclasses.replace(layer.config, activation=SwiGLU())


def swiglu_in_shared(layer: MoE) -> None:
    assert layer.shared is not None
    layer.shared.activation = SwiGLU()


def drop_the_norm(layer: MoE) -> None:
    layer.latent_norm = None


def double_an_expert(layer: MoE) -> None:
    _edit_packed(layer.w2, lambda codes: codes, lambda scales: scales.at[DOUBLED].add(jnp.uint8(1)))


def beta_off(layer: MoE) -> None:
    _scale_betas(layer, 1.05, 1.0)


def linear_beta_off(layer: MoE) -> None:
    _scale_betas(layer, 1.0, 1.05)


def beta_low(layer: MoE) -> None:
    _scale_betas(layer, 0.95, 1.0)


def linear_beta_low(layer: MoE) -> None:
    _scale_betas(layer, 1.0, 0.95)


def round_logits(layer: MoE) -> None:
    layer.router = RoundedRouter(layer.router.weight[...], layer.router.bias[...])


def round_input_of_router(layer: MoE) -> None:
    layer.router = RoundedInputRouter(layer.router.weight[...], layer.router.bias[...])


def round_bias_when_picking(layer: MoE) -> None:
    layer.__class__ = RoundedBiasMoE


def swap_nibbles(layer: MoE) -> None:
    _edit_packed(layer.w13, lambda codes: (codes >> 4) | (codes << 4), lambda scales: scales)


def shift_scale_blocks(layer: MoE) -> None:
    _edit_packed(layer.w2, lambda codes: codes, lambda scales: jnp.roll(scales, 1, axis=-1))


def bfloat16_bias(layer: MoE) -> None:
    layer.router.bias.set_value(layer.router.bias[...].astype(jnp.bfloat16).astype(jnp.float32))


def zero_the_experts(layer: MoE) -> None:
    _edit_packed(layer.w2, jnp.zeros_like, lambda scales: scales)


def poison_a_scale(layer: MoE) -> None:
    _edit_packed(layer.w2, lambda codes: codes, lambda scales: scales.at[0, 0, 0].set(jnp.uint8(255)))


MUTATIONS: dict[Mutation, str] = {
    swap_gate_and_up: "experts",
    swap_shared_halves: "shared",
    swiglu_for_situ: "experts",
    swiglu_in_shared: "shared",
    drop_the_norm: "norm",
    double_an_expert: "experts",
    beta_off: "experts",
    beta_low: "experts",
    linear_beta_off: "activation",
    linear_beta_low: "activation",
    round_logits: "router",
    round_input_of_router: "router",
    round_bias_when_picking: "router",
    swap_nibbles: "experts",
    shift_scale_blocks: "experts",
    bfloat16_bias: "router",
    zero_the_experts: "experts",
    poison_a_scale: "experts",
}
"""Each fault and the first stage that shows it."""


def _edit_packed(
    experts: FrozenExperts, codes: Callable[[jax.Array], jax.Array], scales: Callable[[jax.Array], jax.Array]
) -> None:
    packed = experts.get_value()
    assert isinstance(packed, MXFP4Array)
    experts.set_value(MXFP4Array(codes(packed.codes), scales(packed.scales)))


def _scale_betas(layer: MoE, beta: float, linear_beta: float) -> None:
    situ = layer.config.activation
    assert isinstance(situ, Situ)
    assert situ.linear_beta is not None
    wrong = Situ(situ.beta * beta, situ.linear_beta * linear_beta)
    layer.config = dataclasses.replace(layer.config, activation=wrong)
    assert isinstance(layer.shared, nnx.Module)
    layer.shared.activation = wrong
