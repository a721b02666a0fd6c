"""The command line: exit status, what is said on success and on a mistake, and the files that are written."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoint_edits import edit_config, rewrite, tiny_checkpoint
from mutations import MUTATIONS, double_an_expert, swap_gate_and_up
from typer.testing import CliRunner, Result

from k3jax.cli import app
from k3jax.compare import run as compare_run
from k3jax.loading import load_layer
from k3jax.mlp import GatedMLP
from k3jax.moe import MoE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("cli"), num_experts=8)


def k3jax(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def compare(folder: Path, *arguments: object) -> Result:
    return k3jax("compare", "--checkpoint", folder, "--tokens", 16, *arguments)


def test_the_default_run_as_a_user_types_it(tmp_path: Path) -> None:
    environment = os.environ | {"K3JAX_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # Programs that run once are compiled less hard.
    command = [str(Path(sys.executable).with_name("k3jax")), "compare", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "128 tokens of unit-normal bfloat16, seed 0" in done.stdout
    assert "All stages agree with the float64 oracle." in done.stdout
    assert done.stderr == ""
    values = json.loads((tmp_path / "out.json").read_text())
    assert values["ok"] is True
    ran = [(result["layer"], result["kind"], result["recipe"]) for result in values["results"]]
    recipes = ("bf16", "w4a16", "w4a8")
    assert ran == [(0, "dense", recipe) for recipe in recipes] + [(1, "moe", recipe) for recipe in recipes]


@pytest.mark.parametrize("mutation", [swap_gate_and_up, double_an_expert], ids=lambda mutation: mutation.__name__)
def test_fault_26_exit_status_and_words_for_a_planted_fault(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutation: Any
) -> None:
    def load_spoiled(*arguments: Any, **named: Any) -> GatedMLP | MoE:
        layer = load_layer(*arguments, **named)
        assert isinstance(layer, MoE)
        mutation(layer)
        return layer

    monkeypatch.setattr(compare_run, "load_layer", load_spoiled)
    files = ("--json", tmp_path / "out.json", "--report", tmp_path / "out.html", "--details")
    result = compare(folder, "--layers", 1, "--recipe", "w4a16", *files)
    assert result.exit_code == 1
    stage = MUTATIONS[mutation]
    assert f"Layer 1, w4a16: first divergence at stage {stage} (relative L2" in result.stdout
    assert "worst tokens (relative L2)" in result.stdout
    assert "worst experts (relative L2)" in result.stdout
    values = json.loads((tmp_path / "out.json").read_text())
    assert (values["ok"], values["results"][0]["first_divergence"]) == (False, stage)
    assert f"first divergence: {stage}" in (tmp_path / "out.html").read_text()


def test_json_has_every_number_and_nothing_is_left_behind(folder: Path, tmp_path: Path) -> None:
    result = compare(folder, "--recipe", "w4a8", "--against", "exact", "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    assert "exact float64" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    values = json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)
    assert values["format"] == "k3jax-compare-1"
    assert {"jax", "numpy", "python", "device"} <= values["environment"].keys()
    assert {result["implementation"] for result in values["results"]} == {"", "xla"}
    moe = values["results"][1]
    assert (moe["layer"], moe["recipe"], moe["against"], moe["tokens"]) == (1, "w4a8", "exact", 16)
    assert sum(moe["expert_load"]) == 16 * 2
    experts = next(stage for stage in moe["stages"] if stage["stage"] == "experts")
    assert experts["ok"] is True
    assert 5e-3 < experts["difference"]["relative_l2"] < 6e-2
    assert len(experts["token_errors"]) == 16
    assert {check["name"] for check in experts["checks"]} >= {"relative L2", "cosine", "worst token"}


def test_plain_experts_run_in_bf16_unless_they_may_be_quantised(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, plain_experts="BF16", num_experts=8)
    default = compare(folder, "--layers", 1, "--json", tmp_path / "out.json")
    assert default.exit_code == 0, default.output
    values = json.loads((tmp_path / "out.json").read_text())
    assert [result["recipe"] for result in values["results"]] == ["bf16"]
    refused = compare(folder, "--layers", 1, "--recipe", "w4a16")
    assert refused.exit_code == 2
    assert "stored plain" in refused.stderr
    quantised = compare(folder, "--layers", 1, "--recipe", "w4a16", "--quantize-plain")
    assert quantised.exit_code == 0, quantised.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--recipe", "w5"), "'w5' is not one of bf16, w4a16, w4a8, w4a8_fp8"),
        (("--layers", "7"), "'7' is not within the model's layers 0-1"),
        (("--layers", "one"), "neither a layer such as 3 nor a range such as 5-7"),
        (("--against", "nowhere.safetensors"), "neither oracle nor exact nor the file of a capture"),
        (("--implementation", "mosaic"), "mosaic"),
        (("--implementation", "fastest"), "'fastest' is not one of"),
        (("--report", "nowhere/r.html"), "nowhere is not a folder"),
        (("--json", "."), "is a folder; name a file"),
        (("--json", 250 * "x"), "cannot be written: File name too long"),
    ],
)
def test_a_mistake_is_one_message_and_status_2(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    result = compare(folder, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_a_broken_checkpoint_is_status_2(tmp_path: Path) -> None:
    missing = compare(tmp_path / "nowhere")
    assert missing.exit_code == 2
    assert "is not a folder" in missing.stderr
    folder = tiny_checkpoint(tmp_path)
    gone = "language_model.model.layers.1.block_sparse_moe.experts.2.w2.weight_scale"
    rewrite(folder, lambda tensors: tensors.__delitem__(gone))
    broken = compare(folder, "--layers", 1)
    assert broken.exit_code == 2
    assert "experts.2.w2.weight_scale" in broken.stderr
    edit_config(folder, {"hidden_act": "[red]gelu[/red]"})
    unsupported = compare(folder)
    assert unsupported.exit_code == 2
    assert "hidden_act='[red]gelu[/red]' is not implemented" in unsupported.stderr


def test_help_names_every_option_and_needs_no_input() -> None:
    result = CliRunner().invoke(app, ["compare", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for option in ("--checkpoint", "--layers", "--tokens", "--seed", "--recipe", "--implementation", "--against"):
        assert option in result.stdout
    assert CliRunner().invoke(app, ["inspect", "--help"]).exit_code == 0
    assert k3jax("compare", "--tokens", 0).exit_code == 2
    assert k3jax("no-such-command").exit_code == 2
