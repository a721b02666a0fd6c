"""Healing in parts: which experts stay, the loss, one step, batches and tokens. Whole runs are in test_heal_runs.py."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layers import SMALL, checkpoint_tensors, random_arrays, random_layer, random_tokens, small_config
from numerics import as_float64, assert_same_bits, relative_l2

from k3jax import LoadOptions, MoE
from k3jax.healing import memory
from k3jax.healing.loss import LossWeights, Power, distillation_loss, imbalance
from k3jax.healing.optimizer import Schedule
from k3jax.healing.pairs import batch_rows
from k3jax.healing.pruning import RULES, best_experts, cut_experts, expert_scores
from k3jax.healing.step import TrainState, make_step, split, start
from k3jax.healing.tokens import structured_tokens
from k3jax.moe import moe_layout
from k3jax.reference import oracle_trace
from k3jax.reference.layer import expert_rows
from sharding import make_mesh

pytestmark = pytest.mark.usefixtures("quickly_compiled")

# ---- pruning


def test_scores_are_rows_weights_and_what_experts_add() -> None:
    arrays = random_arrays(SMALL, "w4a16")
    layer, x = MoE(SMALL, arrays=arrays), random_tokens((20, 128))
    mask = np.arange(20) != 3
    tensors = checkpoint_tensors(arrays)
    trace = oracle_trace(SMALL, tensors, np.asarray(x), recipe="w4a16", mask=mask)
    expected = {rule: np.zeros(16) for rule in RULES}
    for t, k in np.ndindex(trace["expert_ids"].shape):
        expert, weight = trace["expert_ids"][t, k], trace["expert_weights"][t, k]
        if expert < 0:
            continue
        output = expert_rows(SMALL, tensors, int(expert), trace["latent"][t, None], recipe="w4a16")
        for rule, value in (("load", 1), ("weighted-load", weight), ("output-norm", weight * np.linalg.norm(output))):
            expected[rule][expert] += value
    for rule in RULES:
        scores = nnx.jit(lambda layer, x, mask, rule=rule: expert_scores(layer, x, mask, by=rule))(layer, x, mask)
        assert relative_l2(scores, expected[rule]) < 4e-3, rule
    with pytest.raises(ValueError, match="by='rank' is not one of load, weighted-load, output-norm"):
        expert_scores(layer, x, by="rank")


def test_the_best_experts_are_kept_and_ties_go_to_the_lowest_id() -> None:
    scores = np.array([1.0, 5.0, 3.0, 3.0, 3.0, 0.0])
    assert best_experts(scores, 3).tolist() == [1, 2, 3]
    for keep in (0, 7):
        with pytest.raises(ValueError, match=f"keep={keep} must be between 1 and the layer's 6 experts"):
            best_experts(scores, keep)
    with pytest.raises(ValueError, match="expert 2 has a score of NaN"):
        best_experts(np.array([1.0, 2.0, np.nan]), 1)


def test_a_cut_layer_has_the_kept_experts_bits_and_routes_among_them() -> None:
    layer, x = random_layer(SMALL, "w4a16"), random_tokens((64, 128))
    ids = np.array([0, 2, 3, 5, 7, 8, 11, 12, 13, 15])
    cut = cut_experts(layer, ids)
    assert cut.config == small_config(num_experts=10)
    for ours, theirs in zip(jax.tree.leaves(cut.w13), jax.tree.leaves(layer.w13), strict=True):
        assert_same_bits(ours, theirs[ids])
    whole, left = (nnx.jit(lambda layer, x: layer.trace(x))(each, x) for each in (layer, cut))
    unhurt = np.isin(whole["expert_ids"], ids).all(axis=1)
    assert 3 <= unhurt.sum() <= 60
    assert_same_bits(ids[left["expert_ids"][unhurt]], np.asarray(whole["expert_ids"])[unhurt].astype(ids.dtype))
    assert relative_l2(left["output"][unhurt], whole["output"][unhurt]) < 1e-3
    assert relative_l2(left["output"][~unhurt], whole["output"][~unhurt]) > 0.05
    for wrong, message in (
        (ids[:3], "3 experts are left, but num_experts_per_token=4"),
        (ids[[0, 1, 2, 2]], "different"),
    ):
        with pytest.raises(ValueError, match=message):
            cut_experts(layer, wrong)
    grouped = MoE(small_config(num_expert_group=4, topk_group=2), arrays=random_arrays(SMALL, "w4a16"))
    with pytest.raises(NotImplementedError, match="4 groups"):
        cut_experts(grouped, ids)


def test_a_layer_over_a_mesh_is_cut_to_the_same_bits() -> None:
    arrays, ids = random_arrays(SMALL, "w4a16"), np.array([0, 2, 3, 5, 7, 8, 11, 12])
    mesh = make_mesh(expert=2, tensor=3)
    spread = cut_experts(MoE(SMALL, arrays=arrays, mesh=mesh, tokens="sharded"), ids, tokens="sharded")
    alone = cut_experts(MoE(SMALL, arrays=arrays), ids)
    assert spread.layout == moe_layout(spread.config, "w4a16", mesh, "sharded", LoadOptions())
    for ours, theirs in zip(jax.tree.leaves(spread), jax.tree.leaves(alone), strict=True):
        assert_same_bits(np.asarray(ours), np.asarray(theirs))
    assert spread.w2.get_value().codes.addressable_shards[0].data.shape == (4, 64, 16)
    with pytest.raises(ValueError, match="expert"):
        cut_experts(MoE(SMALL, arrays=arrays, mesh=mesh), ids[:7])


# ---- loss and step


def batch_of(layer: MoE, count: int, seed: int) -> dict[str, jax.Array]:
    trace = nnx.jit(lambda layer, x: layer.trace(x))(layer, random_tokens((count, 128), seed))
    return {"x": random_tokens((count, 128), seed), "output": trace["output"], "normed_latent": trace["normed_latent"]}


def test_masked_tokens_get_no_gradient_and_give_none_whatever_they_hold() -> None:
    layer, student = random_layer(SMALL, "w4a16"), random_layer(SMALL, "w4a16", seed=5)
    batch = batch_of(layer, 12, 3)
    mask = jnp.arange(12) % 4 != 1

    @nnx.jit
    def gradients(student: MoE, batch: dict[str, Any]) -> Any:
        def loss(student: MoE, x: jax.Array) -> jax.Array:
            weights = LossWeights(latent=0.5, balance=0.5)
            return distillation_loss(student, batch | {"x": x}, Power(100.0, 50.0), weights)[0]

        return nnx.value_and_grad(loss, argnums=(0, 1))(student, batch["x"])

    def poisoned(value: jax.Array) -> jax.Array:
        return jnp.where(mask[:, None], value, jnp.nan)

    clean = gradients(student, batch | {"mask": mask})
    dirty = gradients(student, jax.tree.map(poisoned, batch) | {"mask": mask})
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        assert_same_bits(a, b)
    _, (_, dx) = clean
    assert np.all(np.any(np.asarray(dx[mask]) != 0, axis=1))
    assert not np.any(dx[~mask])


def test_imbalance_is_zero_for_even_use_and_most_for_one_expert() -> None:
    even = jnp.arange(32).reshape(8, 4) % 16
    assert float(imbalance(jnp.zeros((8, 16)), even)) == pytest.approx(0, abs=1e-6)
    logits = jnp.where(jnp.arange(16)[None, :] == 3, 20.0, -20.0) * jnp.ones((8, 1))
    assert float(imbalance(logits, jnp.full((8, 4), 3))) == pytest.approx(15, rel=1e-5)
    slope = jax.grad(lambda logits: imbalance(logits, jnp.full((8, 4), 3)))(jnp.zeros((8, 16)))
    assert float(slope[0, 3]) > 0 > float(slope[0, 4]), "a step down takes rows from the busy expert"


def test_imbalance_s_gradient_is_that_of_differences_at_given_shares() -> None:
    """Against float64 differences of the docstring's formula, in which shares of rows stay and scores move."""
    rng = np.random.default_rng(5)
    logits, direction = rng.standard_normal((2, 10, 6))
    ids = np.array([[t % 3, 3 + t % 2, 5 if t < 4 else -1] for t in range(10)])
    mask = np.arange(10) != 2
    ids[~mask] = -1  # as a masked token is routed
    share = np.array([np.sum(ids == expert) for expert in range(6)]) / np.sum(ids >= 0)

    def formula(logits: np.ndarray) -> float:
        scores = 1 / (1 + np.exp(-logits))
        return float(6 * np.sum(share * np.mean((scores / scores.sum(axis=1, keepdims=True))[mask], axis=0)) - 1)

    operands = jnp.asarray(ids), jnp.asarray(mask)
    value, gradient = jax.value_and_grad(imbalance)(jnp.asarray(logits, jnp.float32), *operands)
    assert float(value) == pytest.approx(formula(logits), rel=1e-5)
    slope = (formula(logits + 1e-5 * direction) - formula(logits - 1e-5 * direction)) / 2e-5
    assert np.sum(as_float64(gradient) * direction) == pytest.approx(slope, rel=1e-4)


OPTIMIZER = Schedule(steps=10, warmup=0, weight_decay=0.01).optimizer()


@pytest.fixture(scope="module")
def pairs() -> dict[str, jax.Array]:
    return batch_of(random_layer(SMALL, "w4a16", seed=5), 24, 3)


def one_step(layer: MoE, pairs: dict[str, jax.Array], accumulate: int) -> tuple[TrainState, dict[str, Any]]:
    """The state after one step on all of `pairs`, and the step's numbers."""
    student, params, frozen = split(layer)
    step = make_step(student, OPTIMIZER, Power(100.0, 50.0), LossWeights())
    batch = {name: value.reshape(accumulate, -1, value.shape[1]) for name, value in pairs.items()}
    return step(start(params, OPTIMIZER), frozen, batch)


@pytest.fixture(scope="module")
def stepped(pairs: dict[str, jax.Array]) -> tuple[TrainState, dict[str, Any]]:
    """One step of a layer on one device, its tokens in one micro-batch."""
    return one_step(random_layer(SMALL, "w4a16"), pairs, 1)


def assert_same_step(actual: tuple[TrainState, dict[str, Any]], expected: tuple[TrainState, dict[str, Any]]) -> None:
    """Losses and the clipped gradients, which are in the first moment, but for bfloat16's rounding."""
    for name, value in expected[1].items():
        assert float(actual[1][name]) == pytest.approx(float(value), rel=1e-2), name
    for name, moment in expected[0].optimizer[1][0].mu.items():
        assert relative_l2(actual[0].optimizer[1][0].mu[name], moment) < 1e-2, name


def test_only_what_is_unpacked_trains() -> None:
    layer = random_layer(SMALL, "w4a16")
    student, params, frozen = split(layer)
    trained = ["latent_down", "latent_norm", "latent_up", "router/weight", "shared/down", "shared/gate_up"]
    assert sorted(params) == trained
    assert all(value.dtype == jnp.float32 for value in params.values())
    frozen_bytes, trained_bytes = memory.state_bytes(layer)
    assert frozen_bytes == 16 * (3 * 96 * 64 // 2 + 3 * 96 * 64 // 32) + 16 * 4
    assert trained_bytes == 16 * sum(value.size for value in params.values())
    again = student.layer(params, frozen)
    for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(layer), strict=True):
        assert_same_bits(ours, theirs)
    shapes = {value.shape for value in params.values()}
    assert {leaf.shape for leaf in jax.tree.leaves(start(params, OPTIMIZER)) if leaf.ndim} == shapes, (
        "no optimiser state for packed experts"
    )


def test_micro_batches_add_up(pairs: dict[str, jax.Array], stepped: tuple[TrainState, dict[str, Any]]) -> None:
    assert int(stepped[0].step) == 1
    assert_same_step(one_step(random_layer(SMALL, "w4a16"), pairs, 4), stepped)


def test_a_step_over_a_mesh_is_that_of_one_device(
    pairs: dict[str, jax.Array], stepped: tuple[TrainState, dict[str, Any]]
) -> None:
    mesh = make_mesh(data=1, expert=2, tensor=3)
    layer = MoE(SMALL, arrays=random_arrays(SMALL, "w4a16"), mesh=mesh)
    found = one_step(layer, pairs, 1)
    assert_same_step(found, stepped)
    down = found[0].params["shared/down"]
    assert len(down.sharding.device_set) == 6
    assert down.addressable_shards[0].data.shape == (128, 32)


def test_every_epoch_takes_each_row_once_in_another_order() -> None:
    epochs = [np.concatenate([batch_rows(11, 3, 3 * epoch + i, seed=4) for i in range(3)]) for epoch in range(3)]
    assert all(len(set(rows)) == 9 for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 3
    assert_same_bits(batch_rows(11, 3, 4, seed=4), epochs[1][3:6])


def test_tokens_are_the_same_again_and_have_unit_variance() -> None:
    x = structured_tokens(400, 64, seed=3)
    assert_same_bits(structured_tokens(400, 64, seed=3), x)
    assert np.any(structured_tokens(400, 64, seed=3, stream=1) != x)
    assert float(np.mean(as_float64(x) ** 2)) == pytest.approx(1, rel=0.2)
