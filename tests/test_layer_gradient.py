"""Gradients of whole layers: the plain formula against differences of the oracle, and every layer against the formula.

The chain is float64 central differences of `k3jax.reference` -> the gradient of `k3jax.healing.reference` -> the layer.
"""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layers import SMALL, checkpoint_tensors, random_arrays, random_layer, random_tokens, small_config
from numerics import relative_l2

from k3jax import GatedMLP, K3Config, MoE, MoEArrays
from k3jax.healing.reference import mlp_output, moe_output
from k3jax.reference import oracle_trace
from pallas_kernels import MXFP4Array

TOKENS = 6
TINY = small_config(
    hidden_size=64, routed_expert_hidden_size=32, moe_intermediate_size=32, num_experts=6, num_experts_per_token=3
)
LAYER_NAMES = {  # a trainable variable's path -> its field in MoEArrays
    "router/weight": "router_weight",
    "latent_down": "latent_down",
    "latent_norm": "latent_norm",
    "latent_up": "latent_up",
    "shared/gate_up": "shared_gate_up",
    "shared/down": "shared_down",
}


def plain_weights(arrays: MoEArrays, dtype: Any) -> dict[str, np.ndarray]:
    """Every array but the bias, experts dequantised, in `dtype`."""
    found = {}
    for name in (*LAYER_NAMES.values(), "w13", "w2"):
        array = getattr(arrays, name)
        if array is not None:
            values = array.dequantize(jnp.float32) if isinstance(array, MXFP4Array) else array
            found[name] = np.asarray(values).astype(dtype)
    return found


def difference(function: Callable[[np.ndarray], float], at: np.ndarray, direction: np.ndarray) -> float:
    """The slope of `function` at `at` along `direction`, by central differences."""
    step = 1e-5
    return (function(at + step * direction) - function(at - step * direction)) / (2 * step)


def oracle_tensors(weights: dict[str, np.ndarray], bias: np.ndarray) -> dict[str, np.ndarray]:
    """The oracle's names for plain float64 weights; a part that the layer lacks is None."""
    missing = dict.fromkeys(LAYER_NAMES.values())
    return checkpoint_tensors(cast(MoEArrays, SimpleNamespace(**(missing | weights), router_bias=bias)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"router_activation": "softmax", "renormalize": False, "routed_scaling_factor": 2.5, "num_shared_experts": 0},
        {"routed_expert_hidden_size": None, "latent_moe_use_norm": False, "num_experts_per_token": 1},
    ],
)
def test_the_formula_s_gradients_are_those_of_the_oracle(changes: dict[str, Any]) -> None:
    """Along a random direction for each array; and the bias, which only chooses, has none."""
    config = dataclasses.replace(TINY, **changes)
    arrays = random_arrays(config, "bf16")
    weights = plain_weights(arrays, np.float64)
    rng = np.random.default_rng(3)
    x, out = rng.standard_normal((2, TOKENS, config.hidden_size))
    bias = np.asarray(arrays.router_bias, np.float64)
    ids = oracle_trace(config, oracle_tensors(weights, bias), x, recipe="bf16", mode="exact")["expert_ids"]

    def objective(changed: dict[str, np.ndarray], x: np.ndarray, bias: np.ndarray) -> float:
        tensors = oracle_tensors(weights | changed, bias)
        return float(np.sum(out * oracle_trace(config, tensors, x, recipe="bf16", mode="exact", ids=ids)["output"]))

    with jax.enable_x64(True):
        picks = jnp.asarray(ids)
        formula = jax.jit(jax.grad(lambda w, x: jnp.sum(out * moe_output(w, x, config, picks)), argnums=(0, 1)))
        found, dx = jax.tree.map(np.asarray, formula(weights, x))
    for name, gradient in found.items():
        direction = rng.standard_normal(gradient.shape)

        def moved(value: np.ndarray, name: str = name) -> float:
            return objective({name: value}, x, bias)

        slope = difference(moved, weights[name], direction)
        assert np.sum(gradient * direction) == pytest.approx(slope, rel=1e-6), name
    direction = rng.standard_normal(x.shape)
    slope = difference(lambda x: objective({}, x, bias), x, direction)
    assert np.sum(dx * direction) == pytest.approx(slope, rel=1e-6)
    assert difference(lambda bias: objective({}, x, bias), bias, rng.standard_normal(bias.shape)) == 0


@nnx.jit
def gradient_state(layer: Any, x: jax.Array, out: jax.Array, mask: jax.Array) -> Any:
    return nnx.grad(lambda layer, x: jnp.sum(layer(x, mask) * out), argnums=(0, 1))(layer, x)


def gradients(layer: Any, x: jax.Array, out: np.ndarray, mask: np.ndarray | None = None) -> Any:
    """`(by path, dx)` of `sum(layer(x) * out)`."""
    routed = np.ones(len(x), np.bool_) if mask is None else mask
    state, dx = gradient_state(layer, x, jnp.asarray(out), jnp.asarray(routed))
    return {"/".join(map(str, path)): variable[...] for path, variable in nnx.to_flat_state(state)}, dx


def exact_tokens(count: int, seed: int, config: K3Config = SMALL) -> tuple[jax.Array, np.ndarray]:
    """Tokens whose float32 values are bfloat16 ones, and a random direction to look at their outputs from."""
    x = random_tokens((count, config.hidden_size), seed).astype(jnp.float32)
    return x, np.random.default_rng(seed).standard_normal(x.shape).astype(np.float32)


@pytest.mark.parametrize(
    ("recipe", "implementation", "limit"),
    [("bf16", "reference", 0.01), ("w4a16", "xla", 0.01), ("w4a8", "xla", 0.07), ("w4a8_fp8", "reference", 0.07)],
)
def test_a_layer_s_gradients_are_the_formula_s(recipe: str, implementation: str, limit: float) -> None:
    """What eight-bit rows cost is in the forward pass, not in the rule."""
    check_layer_gradients(SMALL, recipe, implementation, limit)


def check_layer_gradients(config: K3Config, recipe: str, implementation: str, limit: float) -> None:
    """Every array and x, over all elements, against the formula."""
    arrays = random_arrays(config, recipe)
    layer = MoE(config, recipe=recipe, implementation=implementation, arrays=arrays)
    x, out = exact_tokens(24, 4, config)
    found, dx = gradients(layer, x, out)
    ids = layer.route(x).ids
    formula = jax.jit(jax.grad(lambda w, x: jnp.sum(out * moe_output(w, x, config, ids)), argnums=(0, 1)))
    expected, expected_dx = formula(plain_weights(arrays, np.float32), x)
    assert not np.any(found.pop("router/bias")), "a choice has no derivative"
    assert found.keys() == LAYER_NAMES.keys(), "packed experts have no gradient"
    for name, field in LAYER_NAMES.items():
        assert relative_l2(found[name], expected[field]) < limit, name
    assert relative_l2(dx, expected_dx) < limit


def test_a_dense_layer_s_gradients_are_the_formula_s() -> None:
    layer = GatedMLP.random(SMALL.hidden_size, 96, activation=SMALL.activation, rngs=nnx.Rngs(0))
    x, out = exact_tokens(24, 5)
    found, dx = gradients(layer, x, out)

    def formula(gate_up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(out * mlp_output(gate_up, down, x, SMALL.activation))

    weights = (layer.gate_up[...].astype(jnp.float32), layer.down[...].astype(jnp.float32))
    expected = jax.jit(jax.grad(formula, argnums=(0, 1, 2)))(*weights, x)
    for ours, truth in zip((found["gate_up"], found["down"], dx), expected, strict=True):
        assert relative_l2(ours, truth) < 0.01


def test_masked_tokens_give_the_routed_path_no_gradient() -> None:
    """Router, latent and norm get what they get where nobody looks at those tokens' outputs; x that of the shared."""
    layer = random_layer(SMALL, "w4a16")
    x, out = exact_tokens(24, 6)
    mask = np.arange(24) % 3 != 1
    found, dx = gradients(layer, x, out, mask)
    others, others_dx = gradients(layer, x, np.where(mask[:, None], out, 0))
    for name in ("router/weight", "latent_down", "latent_norm", "latent_up"):
        assert relative_l2(found[name], others[name]) < 2e-3, name  # another order of summation
    assert relative_l2(dx[mask], others_dx[mask]) < 2e-3
    assert not np.any(others_dx[~mask])
    assert layer.shared is not None
    shared, shared_dx = gradients(layer.shared, x, out)
    assert relative_l2(dx[~mask], shared_dx[~mask]) < 2e-3
    assert relative_l2(found["shared/down"], shared["down"]) < 2e-3
