"""The script that makes checkpoints, as a person runs it."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from k3jax.checkpoint import Checkpoint

SCRIPT = Path(__file__).parent.parent / "scripts" / "make_checkpoint.py"


def run_script(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["make_checkpoint.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return int(ended.value.code or 0)


def test_the_script_makes_what_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made"
    sizes = ["--hidden", "64", "--latent", "32", "--expert-width", "32", "--experts", "4", "--top-k", "2"]
    assert (
        run_script(monkeypatch, str(folder), *sizes, "--no-dense", "--moe-layers", "1", "--plain-experts", "F16") == 0
    )
    assert str(folder) in capsys.readouterr().out
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.config.num_hidden_layers == 1
    assert checkpoint.read_layer(0)["block_sparse_moe.experts.3.w1.weight"].dtype == np.float16


def test_the_script_fails_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_script(monkeypatch, str(tmp_path)) == 1
    assert "exists" in capsys.readouterr().err
    assert run_script(monkeypatch, str(tmp_path / "x"), "--top-k", "33") == 1
    assert "num_experts_per_token=33" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
