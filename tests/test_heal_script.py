"""What `scripts/heal.py` reads and draws, and what it refuses before any work is done."""

import runpy
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from numerics import assert_same_bits
from safetensors.numpy import save_file

from k3jax.healing.optimizer import Schedule
from k3jax.healing.pairs import from_capture
from k3jax.healing.plot import loss_plot

SCRIPT = Path(__file__).parents[1] / "scripts" / "heal.py"


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """Layer 1 whole, layer 0 without its output, layer 2 without a normed latent."""
    rng = np.random.default_rng(0)

    def values(width: int) -> np.ndarray:
        return rng.standard_normal((6, width), np.float32)

    tensors = {
        f"layers.1.{stage}": values(width) for stage, width in (("input", 8), ("normed_latent", 4), ("output", 8))
    }
    tensors |= {f"layers.{layer}.input": values(8) for layer in (0, 2)}
    tensors |= {"layers.0.latent": values(4), "layers.2.output": values(8)}
    path = tmp_path / "capture.safetensors"
    facts = {"engine": "none", "recipe": "bf16", "rounding_order": "engine"}
    save_file(tensors, path, {"format": "k3jax-capture-1"} | facts)
    return path


def test_a_capture_gives_tokens_and_what_the_teacher_made_of_them(capture: Path) -> None:
    pairs = from_capture(capture, 1)
    training, held_out = pairs.split(2)
    assert (len(training), len(held_out)) == (4, 2)
    assert_same_bits(np.concatenate([training.output, held_out.output]), pairs.output)
    assert pairs.normed_latent is not None
    assert pairs.normed_latent.shape == (6, 4)
    assert from_capture(capture, 2).normed_latent is None
    with pytest.raises(ValueError, match="layer 0 lacks the stage output"):
        from_capture(capture, 0)
    with pytest.raises(ValueError, match="has no layer 5; it has 0, 1, 2"):
        from_capture(capture, 5)


def test_the_plot_is_well_formed_and_holds_every_step() -> None:
    drawn = ElementTree.fromstring(loss_plot({"output <1>": [0.5, 0.2, float("nan"), 0.1]}, {"before": 0.6}, "a & b"))
    (line,) = drawn.iter("{http://www.w3.org/2000/svg}polyline")
    assert len(line.attrib["points"].split()) == 3
    heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert heights == sorted(heights), "smaller errors are further down"
    assert any(text.text == "before 0.600" for text in drawn.iter("{http://www.w3.org/2000/svg}text"))


def test_the_rate_rises_and_falls() -> None:
    rate = Schedule(steps=100, learning_rate=1.0, warmup=10).rate()
    values = [float(rate(np.float32(step))) for step in (0, 5, 10, 55, 100)]
    assert values == pytest.approx([1 / 11, 1 / 11 + 0.5 * 10 / 11, 1, 0.55, 0.1], rel=1e-5)
    for wrong in ({"steps": 0}, {"steps": 5, "warmup": 5}, {"steps": 5, "warmup": 0, "clip": 0.0}):
        with pytest.raises(ValueError, match="must be"):
            Schedule(**wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--synthetic"], "a synthetic layer needs keep"),
        (["--tokens", "64", "--batch", "64"], "leave fewer to train on than a batch of 64"),
        (["--batch", "10", "--accumulate", "3"], "accumulate=3 must divide batch=10"),
        (["--json", "/no/such/folder/log.json"], "/no/such/folder is not a folder"),
        (["--learning-rate", "-1"], "learning_rate=-1.0"),
        (["--keep", "15", "--mesh", "expert=2"], "keep=15 experts cannot be shared evenly over expert=2"),
        (["--tokens-layout", "sharded"], "tokens sharded need a mesh"),
        (["--synthetic", "--keep", "16", "--mesh", "expert=2"], "a synthetic layer is made on one device"),
        (["--adapters", "apart.safetensors"], "give a rank"),
    ],
)
def test_a_wrong_request_fails_with_a_reason(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["heal.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
