"""The committed PyTorch capture of the embedded checkpoint, against the oracle and against the layer."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.checkpoint import Checkpoint
from k3jax.checkpoint.synthetic import default_checkpoint
from k3jax.compare.capture import Capture
from k3jax.loading import load_layer
from k3jax.reference import oracle_trace
from pallas_kernels import Situ

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "data" / "golden-embedded.safetensors"
SCRIPT = ROOT / "scripts" / "remake_goldens.py"
OFFICIAL_ORDER = 2e-3
"""Relative L2 that a capture with the official rounding order allows the recipe bf16."""


@pytest.fixture(scope="module")
def golden() -> Capture:
    return Capture.open(GOLDEN)


@pytest.fixture(scope="module")
def remake() -> ModuleType:
    spec = importlib.util.spec_from_file_location("remake_goldens", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_agrees(actual: dict[str, np.ndarray], golden: dict[str, np.ndarray]) -> None:
    """Picks equal, every other stage within the tolerance and as large as the golden's."""
    for stage, expected in golden.items():
        if stage == "input":
            continue
        if stage == "expert_ids":
            np.testing.assert_array_equal(actual[stage], expected)
            continue
        a, b = actual[stage].astype(np.float64), expected.astype(np.float64)
        assert a.shape == b.shape, stage
        assert np.linalg.norm(b) > 0.1 * np.sqrt(b.size) * (0.1 if stage == "expert_weights" else 1), stage
        assert np.linalg.norm(a - b) < OFFICIAL_ORDER * np.linalg.norm(b), stage


def test_the_golden_covers_every_stage(golden: Capture) -> None:
    golden.check_against(Checkpoint.open(default_checkpoint()).config)
    assert (golden.recipe, golden.rounding_order) == ("bf16", "official")
    assert golden.layers[0].keys() == {"input", "output"}
    assert len(golden.layers[1]) == 9
    assert len(golden.layers[1]["input"]) == 24
    assert GOLDEN.stat().st_size < 1_000_000


@pytest.mark.parametrize("layer", [0, 1])
def test_the_oracle_agrees_with_pytorch(golden: Capture, layer: int) -> None:
    checkpoint = Checkpoint.open(default_checkpoint())
    stages = golden.layers[layer]
    tensors = checkpoint.read_layer(layer)
    assert_agrees(oracle_trace(checkpoint.config, tensors, stages["input"], recipe="bf16"), stages)


@pytest.mark.parametrize("layer", [0, 1])
def test_the_layer_agrees_with_pytorch(golden: Capture, layer: int) -> None:
    stages = golden.layers[layer]
    trace = load_layer(default_checkpoint(), layer, recipe="bf16").trace(jnp.asarray(stages["input"]))
    assert_agrees({stage: np.asarray(value) for stage, value in trace.items()}, stages)


def test_the_comparison_would_notice(golden: Capture) -> None:
    """Betas off by 5 %, or the first half of the picks dropped, are no rounding."""
    checkpoint = Checkpoint.open(default_checkpoint())
    tensors = checkpoint.read_layer(1)
    stages = golden.layers[1]
    activation = Situ(beta=4.2, linear_beta=25.0)
    wrong_beta = oracle_trace(
        replace(checkpoint.config, activation=activation), tensors, stages["input"], recipe="bf16"
    )
    with pytest.raises(AssertionError, match="expert_sum"):
        assert_agrees(wrong_beta, stages)
    fewer_picks = replace(checkpoint.config, num_experts_per_token=2)
    with pytest.raises(AssertionError):
        assert_agrees(oracle_trace(fewer_picks, tensors, stages["input"], recipe="bf16"), stages)


def test_remade_goldens_are_compared_by_value(golden: Capture, remake: ModuleType) -> None:
    assert remake.differences(golden, golden) == []

    def changed(stage: str, array: np.ndarray) -> Capture:
        return replace(golden, layers={**golden.layers, 1: golden.layers[1] | {stage: array}})

    stages = golden.layers[1]
    one_ulp = stages["output"].copy()
    one_ulp.view(np.uint16)[0, 0] ^= 1
    assert remake.differences(changed("output", one_ulp), golden) == []
    other_input = stages["input"].copy()
    other_input.view(np.uint16)[0, 0] ^= 1
    assert remake.differences(changed("input", other_input), golden) == [
        "layer 1 input: differs, and must not by a bit"
    ]
    for stage, array, message in (
        ("output", 1.01 * stages["output"].astype(np.float32), "committed (24, 512) bfloat16"),
        ("output", (1.01 * stages["output"].astype(np.float32)).astype(stages["output"].dtype), "relative L2 9.9e-03"),
        ("latent", np.full_like(stages["latent"], np.nan), "relative L2 inf"),
        ("expert_ids", stages["expert_ids"][:, ::-1], "expert_ids: differs"),
    ):
        [line] = remake.differences(changed(stage, array), golden)
        assert message in line
    assert "other tensors" in remake.differences(replace(golden, layers={0: golden.layers[0]}), golden)[0]
    assert "recipe" in remake.differences(replace(golden, recipe="w4a8"), golden)[0]


def test_without_pytorch_the_goldens_are_loudly_not_remade(tmp_path: Path) -> None:
    default_checkpoint()
    environment = os.environ | {"K3JAX_CACHE": str(tmp_path), "PATH": str(tmp_path), "PYENV_ROOT": str(tmp_path)}
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "PYTORCH GOLDENS WERE NOT REMADE: no Python 3.11" in done.stderr


def test_the_environment_asks_for_what_the_capture_script_declares(remake: ModuleType) -> None:
    assert remake.script_dependencies() == ["torch==2.13.0", "numpy", "safetensors"]
