"""The layers through their public interface: against the oracle, under JAX's transformations, and metamorphically."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotations import unchecked_annotations
from flax import nnx
from layers import SMALL, checkpoint_tensors, random_arrays, random_layer, random_tokens, small_config
from numerics import as_float64, assert_same_bits, relative_l2

from k3jax import GatedMLP, MoE, Routing
from k3jax.compare.tolerances import limits
from k3jax.experts import RECIPES
from k3jax.reference import oracle_trace
from pallas_kernels import KernelWeights, MXFP4Array, Situ, SwiGLU

STAGES = ["router_logits", "expert_ids", "expert_weights", "latent", "expert_sum", "normed_latent", "shared", "output"]
CONFIGS = {
    "released": SMALL,
    "SwiGLU": small_config(activation=SwiGLU()),
    "identity up": small_config(activation=Situ(1.0, None)),
    "no latent": small_config(routed_expert_hidden_size=None, latent_moe_use_norm=False),
    "no norm": small_config(latent_moe_use_norm=False),
    "no shared experts": small_config(num_shared_experts=0),
    "one pick": small_config(num_experts_per_token=1),
    "groups, softmax": small_config(num_expert_group=4, topk_group=2, router_activation="softmax"),
}

# Half the time to compile, and the same numbers.
quickly_compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})
call: Any = quickly_compiled(lambda layer, x, mask=None: layer(x, mask))
trace: Any = quickly_compiled(lambda layer, x, mask=None: layer.trace(x, mask))
route: Any = quickly_compiled(lambda layer, x: layer.route(x))
run_routed: Any = quickly_compiled(lambda layer, x, routing: layer.routed(x, routing))


CASES = [(name, recipe) for name in CONFIGS for recipe in (RECIPES if name == "released" else ["w4a8"])]


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_every_stage_against_the_oracle(name: str, recipe: str) -> None:
    config = CONFIGS[name]
    arrays = random_arrays(config, recipe)
    x = random_tokens((48, 128))
    stages = trace(MoE(config, recipe=recipe, arrays=arrays), x)
    ids = np.asarray(stages["expert_ids"])
    truth = oracle_trace(config, checkpoint_tensors(arrays), np.asarray(x), recipe=recipe, ids=ids)
    np.testing.assert_array_equal(ids, truth["expert_ids"])
    assert set(stages) == {stage for stage in STAGES if stage in truth}
    for stage, value in stages.items():
        tolerance = limits("oracle", recipe)
        allowed = tolerance.router_l2 if value.dtype == jnp.float32 else tolerance.relative_l2
        assert relative_l2(value, truth[stage]) < allowed, stage


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((128,), jnp.bfloat16),
        ((1, 128), jnp.float16),
        ((3, 1, 5, 128), jnp.float32),
        ((0, 128), jnp.bfloat16),
        ((2, 0, 128), jnp.float32),
    ],
)
def test_any_leading_shape_and_dtype(shape: tuple[int, ...], dtype: type) -> None:
    layer = random_layer(SMALL, "w4a8")
    dense = GatedMLP.random(128, 96, activation=SMALL.activation, rngs=nnx.Rngs(0))
    x = random_tokens(shape, dtype=dtype)
    for one in (layer, dense):
        y = call(one, x)
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        flat = call(one, x.reshape(-1, 128)).reshape(shape)
        assert_same_bits(y, flat)


def test_a_second_call_does_not_recompile() -> None:
    apply: Any = jax.jit(lambda layer, x: layer(x))
    apply(random_layer(SMALL, "w4a16"), random_tokens((6, 128)))
    apply(random_layer(SMALL, "w4a16", seed=5), random_tokens((6, 128), seed=9))
    assert apply._cache_size() == 1


@pytest.mark.parametrize("recipe", ["w4a16", "w4a8"])
def test_vmap_equals_the_flat_call(recipe: str) -> None:
    layer = random_layer(SMALL, recipe)
    x = random_tokens((3, 5, 128))
    assert relative_l2(quickly_compiled(jax.vmap(layer))(x), call(layer, x)) < 1e-3


def test_export_and_back() -> None:
    layer = random_layer(SMALL, "w4a8")
    x = random_tokens((4, 128))
    exported = jax.export.export(jax.jit(lambda x: layer(x)))(jax.ShapeDtypeStruct(x.shape, x.dtype))
    back = quickly_compiled(jax.export.deserialize(exported.serialize()).call)
    assert_same_bits(back(x), call(layer, x))


@pytest.mark.parametrize("recipe", ["w4a16"])  # every recipe's gradients: test_layer_gradient.py
def test_the_gradient_of_x_against_finite_differences(recipe: str) -> None:
    """Central differences of the float64 oracle without any rounding, along random directions, picks held."""
    arrays = random_arrays(SMALL, recipe)
    layer = MoE(SMALL, recipe=recipe, arrays=arrays)
    x = random_tokens((6, 128), dtype="float32")
    rng = np.random.default_rng(1)
    out = rng.standard_normal(x.shape)

    def gradient_of(layer: Any) -> jax.Array:
        return quickly_compiled(jax.grad(lambda x: jnp.sum(layer(x) * jnp.asarray(out, jnp.float32))))(x)

    gradient, recomputed = gradient_of(layer), gradient_of(jax.checkpoint(layer))
    assert relative_l2(recomputed, gradient) < 1e-2  # bfloat16 cotangents, added up in another order

    tensors, ids = checkpoint_tensors(arrays), np.asarray(route(layer, x).ids)

    def objective(x: np.ndarray) -> float:
        return float(np.sum(out * oracle_trace(SMALL, tensors, x, recipe=recipe, mode="exact", ids=ids)["output"]))

    directions = rng.standard_normal((4, *x.shape))
    step = 1e-5
    differences = [
        (objective(as_float64(x) + step * d) - objective(as_float64(x) - step * d)) / (2 * step) for d in directions
    ]
    ours = [float(np.sum(as_float64(gradient) * d)) for d in directions]
    assert relative_l2(ours, differences) < 0.03


def test_masked_tokens_get_only_the_shared_experts() -> None:
    layer = random_layer(SMALL, "w4a8")
    x = random_tokens((2, 3, 128))
    mask = jnp.array([[True, False, True], [False, False, True]])
    y, unmasked = call(layer, x, mask), call(layer, x)
    assert_same_bits(y[mask], unmasked[mask])
    assert layer.shared is not None
    assert_same_bits(y[~mask], call(layer.shared, x)[~mask])
    assert_same_bits(trace(layer, x, mask)["expert_ids"].reshape(2, 3, 4)[~mask], jnp.full((3, 4), -1, jnp.int32))


def test_a_masked_tokens_content_never_leaks() -> None:
    layer = random_layer(SMALL, "w4a8_fp8")
    x = random_tokens((5, 128))
    mask = jnp.array([True, True, False, True, False])
    poisoned = x.at[2].set(jnp.nan)
    assert_same_bits(call(layer, poisoned, mask)[mask], call(layer, x, mask)[mask])


def one_hot_layer() -> MoE:
    """One pick weighs 1, no norm and no shared experts: `routed` shows each expert's own output."""
    return random_layer(small_config(num_experts_per_token=1, latent_moe_use_norm=False, num_shared_experts=0), "w4a16")


def test_masked_ids_contribute_nothing_and_repeated_ones_count_twice() -> None:
    """Faults 12 and 13."""
    layer = one_hot_layer()
    x = random_tokens((1, 128))

    def routed(ids: list[int], weights: list[float]) -> np.ndarray:
        return as_float64(run_routed(layer, x, Routing(jnp.array([ids]), jnp.array([weights]))))

    expert_2, expert_3 = routed([2], [1.0]), routed([3], [1.0])
    np.testing.assert_array_equal(routed([-1, 2], [5.0, 1.0]), expert_2)
    np.testing.assert_array_equal(routed([-1, -1], [1.0, 1.0]), np.zeros((1, 64)))
    np.testing.assert_array_equal(routed([3, 3], [0.5, 0.5]), expert_3)
    np.testing.assert_array_equal(routed([3, 3], [1.0, 1.0]), 2 * expert_3)
    assert relative_l2(routed([2, 3], [0.25, 0.75]), 0.25 * expert_2 + 0.75 * expert_3) < 4e-3


@pytest.mark.parametrize("recipe", ["bf16", "w4a8"])
def test_permuting_the_experts_changes_nothing(recipe: str) -> None:
    arrays = random_arrays(SMALL, recipe)
    assert not isinstance(arrays.w13, KernelWeights)
    assert not isinstance(arrays.w2, KernelWeights)
    order = np.random.default_rng(2).permutation(16)
    permuted = dataclasses.replace(
        arrays,
        router_weight=arrays.router_weight[order],
        router_bias=arrays.router_bias[order],
        w13=arrays.w13[order],
        w2=arrays.w2[order],
    )
    x = random_tokens((40, 128))
    first, second = (MoE(SMALL, recipe=recipe, arrays=each) for each in (arrays, permuted))
    assert_same_bits(call(first, x), call(second, x))
    np.testing.assert_array_equal(order[np.asarray(route(second, x).ids)], route(first, x).ids)


def test_each_token_is_computed_by_itself() -> None:
    layer = random_layer(SMALL, "w4a8")
    x = random_tokens((33, 128))
    order = np.random.default_rng(4).permutation(33)
    assert relative_l2(call(layer, x[order]), call(layer, x)[order]) < 1e-3


def test_every_token_to_one_expert_drops_none() -> None:
    """Fault 14, on one device: no capacity exists to overflow."""
    layer = one_hot_layer()
    x = random_tokens((300, 128))
    hot = run_routed(layer, x, Routing(jnp.full((300, 1), 5), jnp.ones((300, 1))))
    alone = run_routed(layer, x[:16], Routing(jnp.full((16, 1), 5), jnp.ones((16, 1))))
    assert relative_l2(hot[:16], alone) < 1e-3
    assert bool(jnp.all(jnp.any(hot != 0, axis=1)))


@pytest.mark.parametrize("recipe", ["w4a16", "w4a8_fp8"])
def test_the_release_numbers_of_experts_and_picks(recipe: str) -> None:
    """Fault 21, at small widths."""
    config = small_config(num_experts=896, num_experts_per_token=16, moe_intermediate_size=32)
    arrays = random_arrays(config, recipe)
    x = random_tokens((24, 128))
    y = call(MoE(config, recipe=recipe, arrays=arrays), x)
    truth = oracle_trace(config, checkpoint_tensors(arrays), np.asarray(x), recipe=recipe)
    assert relative_l2(y, truth["output"]) < limits("oracle", recipe).relative_l2


def test_recipes_keep_their_weights_as_they_say() -> None:
    for recipe, kind in (("bf16", jax.Array), ("w4a16", MXFP4Array), ("w4a8", MXFP4Array), ("w4a8_fp8", MXFP4Array)):
        assert isinstance(random_layer(SMALL, recipe).w13.get_value(), kind), recipe


def test_w4a16_and_bf16_are_the_same_numbers() -> None:
    packed = random_arrays(SMALL, "w4a16")
    assert isinstance(packed.w13, MXFP4Array)
    assert isinstance(packed.w2, MXFP4Array)
    plain = dataclasses.replace(packed, w13=packed.w13.dequantize(), w2=packed.w2.dequantize())
    x = random_tokens((20, 128))
    assert_same_bits(
        call(MoE(SMALL, recipe="bf16", arrays=plain), x), call(MoE(SMALL, recipe="w4a16", arrays=packed), x)
    )


def test_a_dense_layer_against_a_float64_formula() -> None:
    layer = GatedMLP.random(128, 96, activation=SMALL.activation, rngs=nnx.Rngs(3))
    x = random_tokens((30, 128))
    gate, up = (as_float64(x) @ as_float64(part).T for part in layer.gate_up[...])
    hidden = 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * 25 * np.tanh(up / 25)
    assert relative_l2(call(layer, x), hidden @ as_float64(layer.down[...]).T) < limits("exact", "bf16").relative_l2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "w4a4"}, "recipe='w4a4' is not one of bf16, w4a16, w4a8, w4a8_fp8"),
        ({"recipe": "bf16"}, "w13 must be a bfloat16 array"),
        ({"implementation": "cuda"}, "implementation='cuda' is not one of"),
        ({"arrays": None}, "either arrays= or rngs="),
        ({"config": small_config(num_experts=None)}, "no num_experts"),
        ({"config": small_config(num_shared_experts=3)}, r"shared_gate_up has shape \(2, 192, 128\)"),
        ({"config": small_config(moe_intermediate_size=64, num_shared_experts=3)}, r"w13 has shape \(16, 2, 96, 64\)"),
        ({"config": small_config(latent_moe_use_norm=False)}, r"latent_norm has shape \(64,\).*asks for None"),
    ],
)
def test_a_wrong_construction_says_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"config": SMALL, "recipe": "w4a16", "arrays": random_arrays(SMALL, "w4a16")}
    arguments = given | changes
    with pytest.raises(ValueError, match=message):
        MoE(arguments.pop("config"), **arguments)


@pytest.mark.parametrize(
    ("x", "mask", "message"),
    [
        (jnp.zeros((3, 64), jnp.bfloat16), None, "last axis must be hidden_size=128"),
        (jnp.zeros((3, 128), jnp.int32), None, "x is int32"),
        (jnp.zeros((3, 128), jnp.bfloat16), jnp.zeros((3, 1), bool), r"needs a mask bool\[3\], not bool\[3, 1\]"),
        (jnp.zeros((3, 128), jnp.bfloat16), jnp.zeros(3), "not float32"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(x: jax.Array, mask: jax.Array | None, message: str) -> None:
    dense = GatedMLP.random(128, 96, activation=SMALL.activation, rngs=nnx.Rngs(0))
    for layer in (random_layer(SMALL, "w4a16"), dense):
        with unchecked_annotations(), pytest.raises(ValueError, match=message):
            layer(x, mask)
