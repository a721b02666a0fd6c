"""Evaluation of several layers over a token file: one device, a mesh in one process, a mesh over several processes."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from checkpoint_edits import tiny_config
from numerics import relative_l2

from k3jax.checkpoint.synthetic import write_checkpoint
from k3jax.compare.capture import Capture
from k3jax.evaluation.results import capture_writer
from k3jax.evaluation.run import LayerStatistics, Plan, Request, evaluate, plan
from k3jax.loading import load_layer
from sharding.mesh import MeshSizes

SCRIPTS = Path(__file__).parent.parent / "scripts"
TOKENS = 53  # not divisible by any mesh here


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(num_experts=16, top_k=4, expert_width=64, layers=2)
    return write_checkpoint(tmp_path_factory.mktemp("evaluation") / "checkpoint", config)


@pytest.fixture(scope="module")
def tokens(folder: Path) -> Path:
    path = folder.parent / "tokens.npy"
    np.save(path, np.random.default_rng(5).standard_normal((TOKENS, 96), np.float32))
    return path


def evaluated(
    folder: Path, tokens: Path, **choices: Any
) -> tuple[Plan, list[LayerStatistics], dict[int, dict[int, np.ndarray]]]:
    """The plan, the statistics, and layer -> first token -> output."""
    planned = plan(Request(checkpoint=folder, tokens=tokens, **choices))
    outputs: dict[int, dict[int, np.ndarray]] = {layer: {} for layer in planned.layers}

    def keep(layer: int, start: int, output: np.ndarray) -> None:
        outputs[layer][start] = output

    return planned, list(evaluate(planned, keep=keep)), outputs


def whole(batches: dict[int, np.ndarray]) -> np.ndarray:
    return np.concatenate([batches[start] for start in sorted(batches)])


@pytest.fixture(scope="module")
def one_device(folder: Path, tokens: Path) -> dict[int, np.ndarray]:
    """Each layer's output by the layer itself, all tokens at once."""
    x = np.load(tokens)
    return {layer: np.asarray(jax.jit(load_layer(folder, layer))(x)) for layer in range(2)}


def test_one_device(folder: Path, tokens: Path, one_device: dict[int, np.ndarray], tmp_path: Path) -> None:
    _, statistics, outputs = evaluated(folder, tokens, batch=16)
    assert [(layer.layer, layer.kind, layer.tokens) for layer in statistics] == [
        (0, "dense", TOKENS),
        (1, "moe", TOKENS),
    ]
    for layer in statistics:
        assert sorted(outputs[layer.layer]) == [0, 16, 32, 48]
        found, expected = whole(outputs[layer.layer]), one_device[layer.layer]
        assert relative_l2(found, expected) < 1e-3  # another number of rows may sum in another order
        assert layer.rms == pytest.approx(np.sqrt(np.mean(found.astype(np.float64) ** 2)))
        assert (layer.non_finite, layer.relative_l2) == (0, None)
        assert layer.tokens_per_second == layer.tokens / layer.seconds
    for layer in statistics[1:]:
        assert sum(layer.expert_rows) == TOKENS * 4
        assert layer.rank_rows == (TOKENS * 4,)


def test_what_is_not_finite_is_counted(folder: Path, tmp_path: Path) -> None:
    x = np.load(folder.parent / "tokens.npy")
    x[7, 3] = np.nan
    np.save(tmp_path / "bad.npy", x)
    _, (statistics,), outputs = evaluated(folder, tmp_path / "bad.npy", layers=(0,))
    assert statistics.non_finite == 96
    assert not np.isfinite(outputs[0][0][7]).any()


@pytest.mark.parametrize("layout", ["replicated", "sharded"])
def test_a_mesh(folder: Path, tokens: Path, one_device: dict[int, np.ndarray], layout: Any, tmp_path: Path) -> None:
    """Over 8 devices the numbers are one device's; the results are a capture, and a token file to measure against."""
    path = tmp_path / "results.safetensors"
    mesh = MeshSizes(expert=4, tensor=2)
    planned = plan(Request(checkpoint=folder, tokens=tokens, layers=(0, 1), mesh=mesh, layout=layout, batch=20))
    with capture_writer(path, planned) as keep:
        statistics = list(evaluate(planned, keep=keep))
        assert not path.exists()
    capture = Capture.open(path)
    capture.check_against(planned.config)
    assert (capture.recipe, capture.rounding_order) == ("w4a16", "official")
    for layer in statistics:
        np.testing.assert_array_equal(capture.layers[layer.layer]["input"], np.load(tokens))
        assert relative_l2(capture.layers[layer.layer]["output"], one_device[layer.layer]) < 5e-3
    rows = np.array(statistics[1].expert_rows)
    assert statistics[1].rank_rows == tuple(rows.reshape(4, 4).sum(axis=1))
    _, (again,), _ = evaluated(folder, path, layers=(0,))
    assert again.relative_l2 is not None
    assert again.relative_l2 < 5e-3


def test_a_failure_leaves_no_result(folder: Path, tokens: Path, tmp_path: Path) -> None:
    planned = plan(Request(checkpoint=folder, tokens=tokens, layers=(0,)))
    with pytest.raises(ZeroDivisionError), capture_writer(tmp_path / "results.safetensors", planned):
        _ = 1 / 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "batch=0 must be at least 1"),
        ({"layers": (3,)}, "layer=3 does not exist"),
        ({"mesh": MeshSizes(expert=4)}, r"has 4 devices; all hosts together 8"),
        ({"mesh": MeshSizes(expert=16)}, "needs 16 devices; there are 8"),
    ],
)
def test_requests_that_make_no_sense(folder: Path, tokens: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(Request(checkpoint=folder, tokens=tokens, **change))
