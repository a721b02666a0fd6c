"""The pieces of `compare`: differences that hide nothing, picks as sets, limits, captures, and whole runs."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_edits import tiny_config
from hypothesis import given
from hypothesis import strategies as st

from k3jax.checkpoint import Checkpoint
from k3jax.checkpoint.safetensors_writer import NewTensor, write_header, write_tensor
from k3jax.checkpoint.synthetic import write_checkpoint
from k3jax.compare.differences import HISTOGRAM_FIRST, difference, expert_errors, histogram, relative_rms, token_errors
from k3jax.compare.layer import Check, compare_layer
from k3jax.compare.picks import compare_picks
from k3jax.compare.probes import activation_grid, boundary_tokens
from k3jax.compare.run import Request, Run, parse_layers, plan, run, unit_normal
from k3jax.compare.tolerances import AGAINST, TOLERANCES, limits
from k3jax.config import K3Config
from k3jax.loading import load_layer
from k3jax.mlp import GatedMLP
from k3jax.moe import MoE
from k3jax.reference import oracle_trace
from pallas_kernels import Situ, SwiGLU

RECIPES = ("bf16", "w4a16", "w4a8", "w4a8_fp8")
SAFETENSORS = {"bfloat16": "BF16", "float32": "F32", "float64": "F64", "int32": "I32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(num_experts=8, top_k=2, layers=4)
    return write_checkpoint(tmp_path_factory.mktemp("compare") / "checkpoint", config)


def small() -> np.ndarray:
    return 0.04 * np.random.default_rng(0).standard_normal((64, 32))


def test_fault_7_zeros_never_pass() -> None:
    truth = small()
    found = difference(np.zeros_like(truth), truth)
    assert np.abs(truth).max() < 0.2  # an absolute tolerance of 0.2 would have let zeros through
    assert (found.relative_l2, found.cosine, found.nonzero, found.nonzero_truth) == (1.0, 0.0, 0.0, 1.0)
    for tolerance in TOLERANCES.values():
        assert found.relative_l2 > 10 * max(tolerance.relative_l2, tolerance.plain_l2)
        assert found.cosine < tolerance.cosine
    assert difference(truth, np.zeros_like(truth)).relative_l2 == np.inf
    assert difference(np.zeros(3), np.zeros(3)).relative_l2 == 0
    assert difference(np.zeros(3), np.zeros(3)).cosine == 1


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_on_one_side_is_broken(poison: float) -> None:
    truth = small()
    ours = truth.copy()
    ours[5, 7] = poison
    assert difference(ours, truth).broken == difference(truth, ours).broken == 1
    assert difference(ours, ours).broken == 0
    assert difference(ours, ours).relative_l2 == 0
    assert np.flatnonzero(np.isinf(token_errors(ours, truth))).tolist() == [5]
    assert relative_rms(ours, truth) == np.inf
    by_expert = expert_errors(ours, truth, np.arange(64)[:, None] % 4, 5)
    assert np.isinf(by_expert).tolist() == [False, True, False, False, False]
    assert np.isnan(by_expert[4])


def test_relative_errors_of_small_elements_count() -> None:
    truth = np.array([1e-6, 1.0, -4.0])
    ours = np.array([1.2e-6, 1.0, -4.0])
    assert difference(ours, truth).relative_l2 < 1e-6
    assert relative_rms(ours, truth) == pytest.approx(0.2 / np.sqrt(3))


def test_the_histogram_counts_by_powers_of_two_of_the_root_mean_square() -> None:
    truth = np.full(8, 2.0)
    ours = truth + np.array([0, 0, 2 * 2.0**-10, -2 * 2.0**-10, 3 * 2.0**-10, 2 * 2.0**-40, 1e9, 2.0])
    counts = histogram(ours, truth)
    filled = {HISTOGRAM_FIRST + index: count for index, count in enumerate(counts) if count}
    assert filled == {HISTOGRAM_FIRST: 1, -10: 3, 0: 1, 3: 1}


def test_picks_agree_as_sets() -> None:
    assert compare_picks(np.array([[1, 2], [3, 0]]), np.array([[2, 1], [0, 3]]), None, 1e-6).agreement == 1.0


def test_near_ties_are_told_from_wrong_picks() -> None:
    scores = np.array([[0.9, 0.5, 0.5 - 1e-8, 0.1], [0.9, 0.5, 0.4, 0.1]])
    picks = compare_picks(np.array([[0, 2], [0, 2]]), np.array([[0, 1], [0, 1]]), scores, 1e-6)
    assert (picks.agreement, picks.near_ties, picks.disagreeing, picks.tokens) == (0.5, 1, 1, (1,))
    assert compare_picks(np.array([[0, 2]]), np.array([[0, 1]]), None, 1e-6).disagreeing == 1
    assert compare_picks(np.array([[0, 0]]), np.array([[0, 1]]), scores, 1e-6).disagreeing == 1
    assert compare_picks(np.array([[-1, -1]]), np.array([[0, 1]]), scores, 1e-6).disagreeing == 2
    assert compare_picks(np.array([[0, -1]]), np.array([[0, 3]]), scores, 1e-6).near_ties == 0  # no expert is the last


def test_limits_cover_every_truth_and_recipe() -> None:
    assert set(TOLERANCES) == {(against, recipe) for against in AGAINST for recipe in RECIPES}
    assert [limits("oracle", recipe).relative_l2 for recipe in RECIPES] == [4e-3, 4e-3, 6e-3, 6e-3]
    assert [limits("exact", recipe).relative_l2 for recipe in RECIPES] == [8e-3, 8e-3, 6e-2, 6e-2]
    assert [limits("official", recipe).relative_l2 for recipe in RECIPES] == [2e-3, 4e-3, 6e-3, 6e-3]
    assert {(limit.relative_l2, limit.cosine) for (against, _), limit in TOLERANCES.items() if against == "engine"} == {
        (6e-2, 0.998)
    }
    assert all(limit.router_l2 < 2e-3 and limit.picks == 0.9999 for limit in TOLERANCES.values())
    assert limits("oracle", "w4a8").stage_l2("shared") == 4e-3
    with pytest.raises(ValueError, match="no tolerance for recipe='w5'"):
        limits("oracle", "w5")


def test_a_check_that_is_not_a_number_fails() -> None:
    assert not Check("x", float("nan"), 1.0).ok
    assert not Check("x", float("nan"), 1.0, at_least=True).ok
    assert str(Check("cosine", 0.5, 0.9, at_least=True)) == "cosine 0.5, below 0.9"
    assert str(Check("relative L2", 0.5, 0.004)) == "relative L2 0.5, above 0.004"


def test_the_probe_reaches_twice_the_betas_and_close_to_zero(folder: Path) -> None:
    config = K3Config.from_pretrained(folder)
    assert config.activation == Situ(4.0, 25.0)
    gate, up = (values.astype(np.float64) for values in activation_grid(config))
    assert (gate.min(), gate.max(), up.min(), up.max()) == (-8, 8, -50, 50)
    for values in (gate, up):
        assert 0 < np.abs(values[values != 0]).min() < 1e-5
        assert 0 in values
    unbounded = activation_grid(dataclasses.replace(config, activation=SwiGLU()))
    assert [values.astype(np.float64).max() for values in unbounded] == [8, 8]
    _, identity_up = activation_grid(dataclasses.replace(config, activation=Situ(4.0, None)))
    assert identity_up.astype(np.float64).max() == 8


def test_the_tokens_of_the_router_probe_barely_choose(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    tensors = checkpoint.read_layer(1)
    x = boundary_tokens(checkpoint.config, tensors)
    assert len(x) >= 20
    assert x.dtype == np.float32
    scores = np.sort(oracle_trace(checkpoint.config, tensors, x, recipe="bf16")["expert_scores"], axis=-1)
    gap = scores[:, -2] - scores[:, -3]  # X = 2
    assert gap.min() >= 3e-6
    assert gap.max() <= 2e-5
    changes: tuple[dict[str, Any], ...] = ({"num_experts_per_token": 8}, {"num_expert_group": 4, "topk_group": 2})
    for change in changes:
        config = dataclasses.replace(checkpoint.config, **change)
        assert boundary_tokens(config, tensors).shape == (0, 96)


@given(st.sets(st.integers(0, 92), min_size=1))
def test_layers_are_parsed_as_written(layers: set[int]) -> None:
    assert parse_layers(",".join(map(str, sorted(layers, reverse=True))), 93) == tuple(sorted(layers))


def test_layer_ranges() -> None:
    assert parse_layers("0,1,5-7, 6", 93) == (0, 1, 5, 6, 7)
    for text in ("", "a", "1-", "-1", "3-2", "93", "0-99999999999999", "1,,2", "1.5", "٣"):
        with pytest.raises(ValueError, match="layers"):
            parse_layers(text, 93)


def test_a_dense_layer_stands_for_every_recipe(folder: Path) -> None:
    result = run(plan(Request(checkpoint=folder, layers="0", tokens=5)))
    assert result.ok
    assert [item.recipe for item in result.results] == ["bf16", "w4a16", "w4a8"]
    assert {item.kind for item in result.results} == {"dense"}
    assert [stage.stage for stage in result.results[0].stages] == ["output", "activation"]


def test_a_dense_layer_with_another_activation_is_found(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    layer = load_layer(folder, 0)
    assert isinstance(layer, GatedMLP)
    layer.activation = SwiGLU()
    x = unit_normal(16, 96, 0)
    result = compare_layer(layer, checkpoint.config, checkpoint.read_layer(0), x, index=0, recipe="bf16")
    assert result.first_divergence is not None
    assert result.first_divergence.stage == "output"
    probe = result.stage("activation")
    assert probe is not None
    assert not probe.ok


def test_the_default_layers_are_the_first_of_each_kind(folder: Path) -> None:
    assert plan(Request(checkpoint=folder)).layers == (0, 1)


def capture_of(folder: Path, path: Path, layers: Mapping[int, dict[str, np.ndarray]], **metadata: str) -> Path:
    arrays = {f"layers.{layer}.{stage}": values for layer, stages in layers.items() for stage, values in stages.items()}
    ordered = dict(sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize))
    tensors = [NewTensor(name, SAFETENSORS[values.dtype.name], values.shape) for name, values in ordered.items()]
    known = {"format": "k3jax-capture-1", "engine": "test", "recipe": "bf16", "rounding_order": "official"}
    with path.open("xb") as file:
        write_header(file, tensors, known | metadata)
        for tensor in tensors:
            write_tensor(file, tensor, [np.ascontiguousarray(ordered[tensor.name])])
    return path


def oracle_stages(folder: Path, tokens: int, recipe: str = "bf16") -> dict[str, np.ndarray]:
    checkpoint = Checkpoint.open(folder)
    x = unit_normal(tokens, 96, 3)
    trace = oracle_trace(checkpoint.config, checkpoint.read_layer(1), x, recipe=recipe)
    return {"input": x} | {stage: values for stage, values in trace.items() if stage != "expert_scores"}


def compared(folder: Path, capture: Path, **request: Any) -> Run:
    return run(plan(Request(checkpoint=folder, against=str(capture), **request)))


def test_a_whole_capture_agrees(folder: Path, tmp_path: Path) -> None:
    stages = oracle_stages(folder, 12)
    order = np.argsort(stages["expert_ids"], axis=-1)  # an engine may list its picks in any order
    for stage in ("expert_ids", "expert_weights"):
        stages[stage] = np.take_along_axis(stages[stage], order, axis=-1)
    result = compared(folder, capture_of(folder, tmp_path / "c.safetensors", {1: stages}))
    assert result.ok, result.verdict
    assert [(item.layer, item.recipe, item.against) for item in result.results] == [(1, "bf16", "official")]
    assert result.results[0].tokens == 12
    assert compared(folder, tmp_path / "c.safetensors", tokens=5).results[0].tokens == 5


@pytest.mark.parametrize("stage", ["output", "router_logits", "expert_sum", "expert_weights"])
def test_a_partial_capture_compares_what_it_has(folder: Path, tmp_path: Path, stage: str) -> None:
    stages = oracle_stages(folder, 12)
    kept = {"input": stages["input"], stage: stages[stage]}
    good = compared(folder, capture_of(folder, tmp_path / "good.safetensors", {1: kept}))
    assert good.ok, good.verdict
    bad = compared(folder, capture_of(folder, tmp_path / "bad.safetensors", {1: kept | {stage: kept[stage] * 1.02}}))
    assert not bad.ok


def test_tokens_that_a_capture_routed_elsewhere_fail_the_router_only(folder: Path, tmp_path: Path) -> None:
    stages = oracle_stages(folder, 12)
    stages["expert_ids"] = stages["expert_ids"].copy()
    free = sorted(set(range(8)) - set(stages["expert_ids"][4].tolist()))
    stages["expert_ids"][4, 0] = free[0]
    stages["expert_sum"][4] = 7.0
    result = compared(folder, capture_of(folder, tmp_path / "c.safetensors", {1: stages})).results[0]
    assert result.skipped_tokens == 1
    assert [stage.stage for stage in result.stages if not stage.ok] == ["router"]
    router = result.stage("router")
    assert router is not None
    assert router.picks is not None
    assert router.picks.tokens == (4,)


def test_an_engine_that_rounds_elsewhere_has_wider_limits(folder: Path, tmp_path: Path) -> None:
    stages = oracle_stages(folder, 12, "w4a8")
    noise = np.random.default_rng(0).standard_normal(stages["output"].shape)
    stages["output"] = stages["output"] * (1 + 0.03 * noise)
    metadata = {"recipe": "w4a8", "rounding_order": "engine"}
    assert compared(folder, capture_of(folder, tmp_path / "c.safetensors", {1: stages}, **metadata)).ok
    metadata["rounding_order"] = "official"
    assert not compared(folder, capture_of(folder, tmp_path / "d.safetensors", {1: stages}, **metadata)).ok


def test_a_nan_of_the_engine_that_we_do_not_have_is_found(folder: Path, tmp_path: Path) -> None:
    stages = oracle_stages(folder, 12)
    stages["output"][3, 5] = np.nan
    result = compared(folder, capture_of(folder, tmp_path / "c.safetensors", {1: stages})).results[0]
    assert result.first_divergence is not None
    assert result.first_divergence.stage == "output"


def test_requests_that_make_no_sense(folder: Path, tmp_path: Path) -> None:
    capture = capture_of(folder, tmp_path / "c.safetensors", {1: oracle_stages(folder, 4)})
    request: dict[str, Any]
    for request, message in (
        ({"recipes": ("w4a8",)}, "quantised differently"),
        ({"layers": "0"}, "has no layer 0; it has 1"),
    ):
        with pytest.raises(ValueError, match=message):
            compared(folder, capture, **request)
    for request, message in (
        ({"recipes": ("w5",)}, "'w5' is not one of bf16"),
        ({"tokens": 0}, "at least one token"),
        ({"layers": "4"}, "not within the model's layers 0-3"),
        ({"implementation": "cutlass"}, "'cutlass' is not one of"),
    ):
        with pytest.raises(ValueError, match=message):
            plan(Request(checkpoint=folder, **request))
    with pytest.raises(FileNotFoundError, match="neither oracle nor exact nor the file"):
        plan(Request(checkpoint=folder, against="orcale"))
    with pytest.raises(NotImplementedError, match="mosaic"):
        plan(Request(checkpoint=folder, implementation="mosaic"))


def test_a_layer_and_a_truth_must_belong_together(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    layer, x = load_layer(folder, 1), unit_normal(4, 96, 0)
    with pytest.raises(ValueError, match="needs the stages of a capture"):
        compare_layer(layer, checkpoint.config, {}, x, index=1, recipe="w4a16", against="engine")
    with pytest.raises(ValueError, match="takes no capture"):
        compare_layer(layer, checkpoint.config, {}, x, index=1, recipe="w4a16", captured={"input": x})


def test_float32_and_float16_inputs_reach_the_router_unrounded(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    layer = load_layer(folder, 1, recipe="bf16")
    assert isinstance(layer, MoE)
    x = np.random.default_rng(0).standard_normal((24, 96))
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        given = x.astype(dtype)
        tensors = checkpoint.read_layer(1)
        result = compare_layer(layer, checkpoint.config, tensors, given, index=1, recipe="bf16")
        assert result.ok, (dtype, result.first_divergence)
    assert jnp.asarray(x.astype(np.float16)).dtype == jnp.float16
