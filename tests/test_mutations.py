"""Fault 26: a comparison that passes when a fault is planted proves nothing. Here each fault is planted alone."""

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from checkpoint_edits import tiny_config
from mutations import DOUBLED, MUTATIONS, Mutation, bfloat16_bias, double_an_expert, drop_the_norm, linear_beta_off

from k3jax.checkpoint import Checkpoint, LayerTensors
from k3jax.checkpoint.synthetic import write_checkpoint
from k3jax.compare.layer import LayerComparison, compare_layer
from k3jax.compare.run import unit_normal
from k3jax.compare.tolerances import Against
from k3jax.loading import load_layer
from k3jax.moe import MoE

TOKENS = 48
BIAS = "block_sparse_moe.gate.e_score_correction_bias"


@dataclasses.dataclass(frozen=True)
class Sample:
    """A small checkpoint's MoE layer, its tensors and some tokens."""

    checkpoint: Checkpoint
    tensors: LayerTensors
    x: np.ndarray

    def load(self, recipe: str = "w4a16") -> MoE:
        layer = load_layer(self.checkpoint.path, 1, recipe=recipe)
        assert isinstance(layer, MoE)
        return layer

    def compare(self, layer: MoE, recipe: str = "w4a16", against: Against = "oracle") -> LayerComparison:
        config = self.checkpoint.config
        return compare_layer(layer, config, self.tensors, self.x, index=1, recipe=recipe, against=against)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sample]:
    config = tiny_config(num_experts=16, top_k=4, expert_width=96, latent_size=128)
    path = write_checkpoint(tmp_path_factory.mktemp("mutations") / "checkpoint", config)
    checkpoint = Checkpoint.open(path)
    yield Sample(checkpoint, checkpoint.read_layer(1), unit_normal(TOKENS, checkpoint.config.hidden_size, 0))
    jax.clear_caches()


@pytest.mark.parametrize("recipe", ["bf16", "w4a16", "w4a8", "w4a8_fp8"])
def test_without_a_fault_every_stage_agrees(sample: Sample, recipe: str) -> None:
    layer = sample.load(recipe)
    for against in ("oracle", "exact"):
        result = sample.compare(layer, recipe, against)
        assert result.ok, result.first_divergence
        stages = [stage.stage for stage in result.stages]
        assert stages == ["router", "latent", "experts", "norm", "shared", "output", "activation"]
        assert all(stage.checks for stage in result.stages)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_fault_26_each_planted_fault_is_found_and_named(sample: Sample, mutation: Mutation) -> None:
    layer = sample.load()
    mutation(layer)
    result = sample.compare(layer)
    assert not result.ok
    first = result.first_divergence
    assert first is not None
    assert first.stage == MUTATIONS[mutation], first.reasons
    assert first.reasons
    assert not sample.compare(layer, against="exact").ok


def test_the_doubled_expert_is_the_worst_one(sample: Sample) -> None:
    layer = sample.load()
    double_an_expert(layer)
    experts = sample.compare(layer).stage("experts")
    assert experts is not None
    assert experts.worst_experts[0][0] == DOUBLED
    picked = np.flatnonzero([error > 0.05 for error in experts.token_errors])
    ids = np.asarray(layer.route(jax.numpy.asarray(sample.x)).ids)
    np.testing.assert_array_equal(picked, np.flatnonzero((ids == DOUBLED).any(axis=-1)))


def test_a_dropped_norm_is_a_missing_stage(sample: Sample) -> None:
    layer = sample.load()
    drop_the_norm(layer)
    norm = sample.compare(layer).stage("norm")
    assert norm is not None
    assert norm.reasons == ("the layer has no such stage",)


def test_a_linear_beta_that_random_tokens_hardly_reach_is_found_by_the_probe(sample: Sample) -> None:
    layer = sample.load()
    linear_beta_off(layer)
    result = sample.compare(layer)
    probe = result.stage("activation")
    assert probe is not None
    assert probe.checks[0].value > 1e-2


def test_fault_24_a_bias_kept_in_bfloat16_moves_picks(sample: Sample) -> None:
    """Biases about 1 that differ by 1e-4 choose among tokens whose scores are equal; bfloat16 makes them all alike."""
    close = (1 + 1e-4 * np.random.default_rng(3).permutation(16)).astype(np.float32)
    x = np.zeros_like(sample.x)
    tensors = dict(sample.tensors) | {BIAS: close}
    config = sample.checkpoint.config
    layer = sample.load()
    layer.router.bias.set_value(jax.numpy.asarray(close))
    assert compare_layer(layer, config, tensors, x, index=1, recipe="w4a16").ok
    bfloat16_bias(layer)
    router = compare_layer(layer, config, tensors, x, index=1, recipe="w4a16").stage("router")
    assert router is not None
    assert router.picks is not None
    assert router.picks.agreement < 0.9
    assert {check.name for check in router.checks if not check.ok} >= {"bias", "pick agreement"}
