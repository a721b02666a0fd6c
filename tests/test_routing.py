"""The router against the float64 oracle, and its edges: ties, masks, groups, real sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotations import unchecked_annotations
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import random_tokens, small_config
from numpy.typing import ArrayLike

from k3jax import Routing, expert_load
from k3jax.config import K3Config
from k3jax.reference import oracle_trace
from k3jax.routing import Router, pick_experts

CONFIGS = {
    "released": small_config(),
    "one pick": small_config(num_experts_per_token=1),
    "scaled, not renormalised": small_config(renormalize=False, routed_scaling_factor=2.5),
    "softmax": small_config(router_activation="softmax"),
    "groups": small_config(num_expert_group=4, topk_group=2),
    "softmax, groups": small_config(router_activation="softmax", num_expert_group=8, topk_group=3),
}


def as_sets(ids: ArrayLike) -> list[set[int]]:
    return [set(row) for row in np.asarray(ids).tolist()]


def numpy_picks(logits: np.ndarray, bias: np.ndarray, config: K3Config) -> np.ndarray:
    """The picks by a formula of NumPy's own sort, in float64 from the given logits; sigmoid scores, no groups."""
    biased = 1 / (1 + np.exp(-logits.astype(np.float64))) + bias
    return np.argsort(-biased, axis=1, kind="stable")[:, : config.experts_per_token]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_picks_and_weights_against_the_oracle(config: K3Config) -> None:
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.standard_normal((16, 128)) / 8, jnp.bfloat16)
    bias = jnp.asarray(rng.standard_normal(16) / 20, jnp.float32)
    x = random_tokens((200, 128))
    routing = pick_experts(Router(weight, bias).logits(x), bias, config)
    truth = oracle_trace(config, _router_only(config, weight, bias), np.asarray(x), recipe="bf16")
    np.testing.assert_array_equal(routing.ids, truth["expert_ids"])
    np.testing.assert_allclose(routing.weights, truth["expert_weights"], rtol=2e-6)


def _router_only(config: K3Config, weight: jax.Array, bias: jax.Array) -> dict[str, np.ndarray]:
    """A layer whose experts are all zero: the oracle wants whole layers."""
    moe = "block_sparse_moe."
    latent, width = config.latent_size, config.expert_width
    zeros = {"w1": (width, latent), "w3": (width, latent), "w2": (latent, width)}
    tensors = {
        f"{moe}experts.{e}.{name}.weight": np.zeros(shape, jnp.bfloat16)
        for e in range(16)
        for name, shape in zeros.items()
    }
    return tensors | {
        f"{moe}gate.weight": np.asarray(weight),
        f"{moe}gate.e_score_correction_bias": np.asarray(bias),
        f"{moe}routed_expert_down_proj.weight": np.zeros((latent, config.hidden_size), jnp.bfloat16),
        f"{moe}routed_expert_up_proj.weight": np.zeros((config.hidden_size, latent), jnp.bfloat16),
    }


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda dtype: dtype.__name__)
def test_logits_are_float32_sums_of_exact_products(dtype: type) -> None:
    x = random_tokens((64, 7168), dtype=dtype)
    weight = random_tokens((32, 7168), seed=8) / 64
    logits = jax.jit(lambda x: Router(weight, jnp.zeros(32)).logits(x))(x)
    truth = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    assert logits.dtype == jnp.float32
    assert np.linalg.norm(np.asarray(logits, np.float64) - truth) / np.linalg.norm(truth) < 2e-6


def test_picks_at_the_release_size() -> None:
    """E 896, X 16 on 4,096 tokens: the share of (token, slot) pairs that float64 picks too (fault 21)."""
    config = small_config(hidden_size=7168, num_experts=896, num_experts_per_token=16)
    rng = np.random.default_rng(3)
    weight = jnp.asarray(rng.standard_normal((896, 7168)) * 7168**-0.5, jnp.bfloat16)
    bias = jnp.asarray(rng.standard_normal(896) * 0.01, jnp.float32)
    x = random_tokens((4096, 7168))
    router = Router(weight, bias)
    routing = jax.jit(lambda x: pick_experts(router.logits(x), bias, config))(x)
    logits = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    expected = as_sets(numpy_picks(logits, np.asarray(bias, np.float64), config))
    agreeing = sum(len(a & b) for a, b in zip(as_sets(routing.ids), expected, strict=True))
    assert agreeing / (4096 * 16) >= 0.9999
    # The same check sees logits rounded to bfloat16, as some engines have them.
    rounded = pick_experts(router.logits(x).astype(jnp.bfloat16).astype(jnp.float32), bias, config)
    agreeing = sum(len(a & b) for a, b in zip(as_sets(rounded.ids), expected, strict=True))
    assert agreeing / (4096 * 16) < 0.9999


def test_equal_scores_go_to_the_lowest_ids() -> None:
    """Fault 25."""
    config = small_config(num_experts_per_token=5)
    zeros = jnp.zeros(16)
    np.testing.assert_array_equal(pick_experts(jnp.zeros((3, 16)), zeros, config).ids, [[0, 1, 2, 3, 4]] * 3)
    logits = jnp.array([[0.0, 1.0] * 8])
    np.testing.assert_array_equal(pick_experts(logits, zeros, config).ids, [[1, 3, 5, 7, 9]])
    grouped = small_config(num_expert_group=8, topk_group=2)
    np.testing.assert_array_equal(pick_experts(jnp.zeros((1, 16)), zeros, grouped).ids, [[0, 1, 2, 3]])
    negative_zero = jnp.array([[0.0, -0.0] * 8])
    np.testing.assert_array_equal(pick_experts(negative_zero, zeros, config).ids, [[0, 1, 2, 3, 4]])


@settings(max_examples=30)
@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=16, max_size=16), st.integers(1, 16))
def test_picks_sort_by_score_then_id(logits: list[float], slots: int) -> None:
    config = small_config(num_experts_per_token=slots)
    ids = pick_experts(jnp.array([logits]), jnp.zeros(16), config).ids
    np.testing.assert_array_equal(ids, numpy_picks(np.array([logits]), np.zeros(16), config))


def test_the_bias_chooses_but_does_not_weigh() -> None:
    config = small_config(num_experts_per_token=2)
    logits = jnp.zeros((1, 16)).at[0, 3].set(1.0)
    bias = jnp.zeros(16).at[9].set(10.0)
    routing = pick_experts(logits, bias, config)
    np.testing.assert_array_equal(routing.ids, [[9, 3]])
    scores = np.array([0.5, 1 / (1 + np.exp(-1.0))])
    np.testing.assert_allclose(routing.weights, [scores / scores.sum()], rtol=1e-6)


def test_bias_differences_of_1e_4_decide() -> None:
    """Fault 24: in bfloat16, 1 + 1e-4 would be 1, and the lowest ids would win."""
    bias = 1 + 1e-4 * np.arange(16, dtype=np.float32)
    config = small_config()
    picks = pick_experts(jnp.zeros((1, 16)), jnp.asarray(bias), config).ids
    np.testing.assert_array_equal(picks, [[15, 14, 13, 12]])
    with unchecked_annotations(), pytest.raises(ValueError, match="bias bfloat16"):
        Router(jnp.zeros((16, 8), jnp.bfloat16), jnp.zeros(16, jnp.bfloat16))


def test_scores_that_vanish_in_float32_weigh_nothing() -> None:
    routing = pick_experts(jnp.full((1, 16), -200.0), jnp.zeros(16), small_config())
    np.testing.assert_array_equal(routing.weights, np.zeros((1, 4)))  # and not 0 / 0


def test_masked_tokens_go_nowhere() -> None:
    mask = jnp.array([True, False, True])
    routing = pick_experts(random_tokens((3, 16), dtype="float32"), jnp.zeros(16), small_config(), mask)
    np.testing.assert_array_equal(routing.ids[1], [-1] * 4)
    np.testing.assert_array_equal(routing.weights[1], [0.0] * 4)
    np.testing.assert_allclose(jnp.sum(routing.weights, axis=1), [1, 0, 1], rtol=1e-6)


def test_expert_load() -> None:
    ids = jnp.array([[0, 3], [3, 3], [-1, 2], [-1, -1]])
    load = expert_load(Routing(ids, jnp.ones((4, 2))), num_experts=4, ranks=2)
    np.testing.assert_array_equal(load.per_expert, [1, 0, 1, 3])
    np.testing.assert_array_equal(load.per_rank, [1, 4])
    with pytest.raises(ValueError, match="ranks=3"):
        expert_load(Routing(ids, jnp.ones((4, 2))), num_experts=4, ranks=3)


def require_picks_of_a_stable_sort(tokens: int) -> None:
    """E 896, X 16, float64 scores: half of the tokens have logits on a grid, so that many scores are equal.

    Scores that are nearer than float32 tells apart may go either way: tokens that have such among the first 17 are few.
    """
    config = small_config(num_experts=896, num_experts_per_token=16)
    pick = jax.jit(lambda logits, bias: pick_experts(logits, bias, config))
    biases = np.zeros(896, np.float32), np.random.default_rng(0).standard_normal(896).astype(np.float32) / 20
    unclear = 0
    for part in range(tokens // 2048):
        normal = np.random.default_rng(part).standard_normal((2048, 896))
        logits = (np.round(8 * normal) / 8 if part % 2 == 0 else normal).astype(np.float32)
        bias = biases[part % 2]
        routing = pick(logits, bias)
        scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
        order = np.argsort(-(scores + bias), axis=1, kind="stable")[:, :17]
        gaps = -np.diff(np.take_along_axis(scores + bias, order, axis=1), axis=1)
        clear = ~((gaps > 0) & (gaps < 1e-6)).any(axis=1)
        unclear += int((~clear).sum())
        np.testing.assert_array_equal(np.asarray(routing.ids)[clear], order[clear, :16])
        weights = np.take_along_axis(scores, order[:, :16], axis=1)
        weights /= weights.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(np.asarray(routing.weights)[clear], weights[clear], rtol=2e-6)
        if part % 2 == 0:
            assert (gaps == 0).any(axis=1).mean() > 0.9, "equal scores are what this is about"
    assert unclear < 1e-2 * tokens


def test_picks_are_those_of_a_stable_sort() -> None:
    require_picks_of_a_stable_sort(4096)


@pytest.mark.slow
def test_a_million_picks_are_those_of_a_stable_sort() -> None:
    require_picks_of_a_stable_sort(1_000_448)
