"""The layer behind a row of `k3jax bench --op layer`, and its programs: whole, the routed path, and stage by stage."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Int

from k3jax.bench.calls import KIMI, Program, compiled, make_experts, normal_weight, plain_experts
from k3jax.bench.cases import Case, even_picks
from k3jax.bench.layer_cases import LayerCase
from k3jax.config import K3Config
from k3jax.experts import RECIPES, HowToMultiply, gate_and_up_rows, routed_experts
from k3jax.moe import MoE, latents
from k3jax.moe_arrays import MoEArrays
from k3jax.routing import Routing
from pallas_kernels import combine_rows, dense_matmul, gather_rows, grouped_matmul, rms_norm, schedule_rows
from pallas_kernels.rounding import to_bfloat16

_PULL = 8.0  # of a token's own experts on its logits, which are otherwise unit-normal


def make_layer(case: LayerCase, implementation: str | None) -> MoE:
    """A layer of the case's sizes with random weights, laid out for `implementation`."""
    config, arrays = make_weights(case)
    return MoE(config, recipe=case.recipe, implementation=implementation, arrays=arrays)


def make_weights(case: LayerCase) -> tuple[K3Config, MoEArrays]:
    """A config of the case's sizes, and random weights for it."""
    config = K3Config(
        hidden_size=case.model,
        intermediate_size=case.model,
        num_hidden_layers=1,
        activation=KIMI,
        rms_norm_eps=1e-5,
        num_experts=case.groups,
        num_experts_per_token=case.picks,
        moe_intermediate_size=case.width,
        num_shared_experts=case.shared,
        routed_expert_hidden_size=case.hidden,
        latent_moe_use_norm=True,
    )
    keys = iter(jax.random.split(jax.random.key(case.seed), 5))
    shared: dict[str, Array] = {}
    if case.shared:
        shared["shared_gate_up"] = normal_weight(next(keys), (2, case.shared_width, case.model))
        shared["shared_down"] = normal_weight(next(keys), (case.model, case.shared_width))
    arrays = MoEArrays(
        router_weight=normal_weight(next(keys), (case.groups, case.model)),
        router_bias=jnp.zeros(case.groups),
        latent_down=normal_weight(next(keys), (case.hidden, case.model)),
        latent_norm=jnp.ones(case.hidden, jnp.bfloat16),
        latent_up=normal_weight(next(keys), (case.model, case.hidden)),
        **shared,
        **_experts(case),
    )
    return config, arrays


def make_tokens(case: LayerCase, layer: MoE) -> BFloat16[Array, "t d"]:
    """Tokens whose picks fall evenly on the experts: unit-normal, and drawn to the rows of the router of their own."""
    ids = jnp.asarray(even_picks(case.tokens, case.picks, case.groups, case.seed))
    return _drawn(jax.random.key(case.seed + case.tokens), layer.router.weight[...], ids)


def layer_program(layer: MoE, x: Array) -> Program:
    """The whole layer."""
    return compiled(lambda layer, x: layer(x), layer, x)


def pick(layer: MoE, x: Array) -> tuple[Routing, np.ndarray]:
    """Where the layer sends `x`, and the rows of each expert."""
    routing = jax.jit(lambda layer, x: layer.route(x))(layer, x)
    ids = np.asarray(routing.ids)
    return routing, np.bincount(ids.reshape(-1), minlength=layer.w13.get_value().shape[0])


def routed_program(layer: MoE, x: Array, routing: Routing) -> Program:
    """The routed path: from ids and weights to the sums, rounded to bfloat16.

    One kernel after the other: only two could run side by side, of 1 and 2 us, and the later one may start 20 us late.
    """
    w13, w2 = gate_and_up_rows(layer.w13.get_value()), layer.w2.get_value()
    how = HowToMultiply(layer.config.activation, layer.recipe, layer.implementation, layer.layout.ranks)

    def routed(latent: Array, routing: Routing, w13: Any, w2: Any) -> Array:
        return to_bfloat16(routed_experts(latent, routing, w13, w2, how))

    return compiled(routed, _latent(layer, x), routing, w13, w2, side_by_side=False)


def stage_programs(layer: MoE, x: Array, routing: Routing, *, all_of_them: bool) -> Iterator[tuple[str, Program]]:
    """The stages, in the order of the data, each on what the ones before it made: all, or those up to the products.

    A stage is a program of its own: within the layer XLA may fuse it with its neighbours.
    """
    config, recipe = layer.config, RECIPES[layer.recipe]
    product = functools.partial(grouped_matmul, implementation=layer.implementation)
    gated = functools.partial(product, activation=config.activation)
    w13, w2 = gate_and_up_rows(layer.w13.get_value()), layer.w2.get_value()
    latent_down, latent_up, norm = layer.latent_down, layer.latent_up, layer.latent_norm
    assert latent_down is not None
    assert latent_up is not None
    assert norm is not None
    made: dict[str, Any] = {}  # results, until the stage that reads them

    def stage(name: str, function: Callable[..., Any], *operands: Any) -> tuple[str, Program]:
        program = compiled(function, *operands)
        made[name] = program()
        return name, program

    def norm_up(sums: Array, gain: Array, weight: Any) -> Array:
        return dense_matmul(rms_norm(sums, gain, eps=config.rms_norm_eps), weight)

    if all_of_them:
        yield stage("router", lambda layer, x: layer.route(x), layer, x)
    yield stage("latent_down", latents, x, latent_down.get_value())
    yield stage("schedule", functools.partial(schedule_rows, groups=w13.shape[0]), routing.ids)
    schedule = made["schedule"]
    latent = made.pop("latent_down")
    if recipe.quantize is not None:
        yield stage("quantize_tokens", recipe.quantize, latent)
        latent = made.pop("quantize_tokens")
    yield stage("gather", gather_rows, latent, schedule)
    yield stage("w13", gated, made.pop("gather"), w13, schedule.group_sizes)
    hidden = made.pop("w13")
    if recipe.quantize is not None:
        yield stage("quantize_hidden", recipe.quantize, hidden)
        hidden = made.pop("quantize_hidden")
    yield stage("w2", product, hidden, w2, schedule.group_sizes)
    del hidden
    if not all_of_them:
        return
    yield stage("combine", combine_rows, made.pop("w2"), schedule.row, routing.weights)
    yield stage("norm_up", norm_up, made.pop("combine"), norm[...], latent_up.get_value())
    if layer.shared is not None:
        yield stage("shared", lambda shared, x: shared.project(x, partial=False), layer.shared, x)


def _latent(layer: MoE, x: Array) -> Array:
    assert layer.latent_down is not None
    return latents(x, layer.latent_down.get_value())


def _experts(case: LayerCase) -> dict[str, Any]:
    """w13 `[E, 2, F, L]` and w2 `[E, L, F]` as the recipe keeps them."""
    of_op = {
        op: Case(op, case.recipe, 1, case.groups, hidden=case.hidden, width=case.width, seed=case.seed)
        for op in ("w13", "w2")
    }
    made = {op: make_experts(one) for op, one in of_op.items()}
    arrays: dict[str, Any] = made if RECIPES[case.recipe].packed else {op: plain_experts(w) for op, w in made.items()}

    def gate_and_up(leaf: Array) -> Array:
        return leaf.reshape(case.groups, 2, case.width, -1)

    return {"w13": jax.tree.map(gate_and_up, arrays["w13"]), "w2": arrays["w2"]}


@jax.jit
def _drawn(key: Array, weight: Array, ids: Int[Array, "t x"]) -> Array:
    own = jnp.zeros((ids.shape[0], weight.shape[0]), jnp.bfloat16).at[jnp.arange(ids.shape[0])[:, None], ids].set(1)
    noise = jax.random.normal(key, (ids.shape[0], weight.shape[1]))
    return (noise + _PULL * jnp.dot(own, weight, preferred_element_type=jnp.float32)).astype(jnp.bfloat16)
