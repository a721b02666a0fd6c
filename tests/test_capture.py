"""Reading captures: what a well-formed file gives, and what each malformed one is told."""

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from k3jax.checkpoint.synthetic import synthetic_config
from k3jax.compare.capture import STAGES, Capture
from k3jax.config import K3Config

BF16 = ml_dtypes.bfloat16
METADATA = {"format": "k3jax-capture-1", "engine": "a test", "recipe": "w4a8", "rounding_order": "engine"}
SIZES = {"T": 3, "D": 64, "E": 8, "X": 2, "L": 32}
CONFIG = K3Config.from_dict(
    synthetic_config(hidden_size=64, latent_size=32, num_experts=8, top_k=2, expert_width=32, layers=3)
)


def moe_stages() -> dict[str, np.ndarray]:
    stages = {stage: np.ones([SIZES[letter] for letter in letters], BF16) for stage, letters in STAGES.items()}
    return stages | {"expert_ids": np.array([[0, 7], [3, 3], [-1, -1]], np.int32)}


def write(path: Path, layers: dict[int, dict[str, np.ndarray]], metadata: dict[str, str] | None = None) -> Path:
    tensors = {f"layers.{layer}.{stage}": array for layer, stages in layers.items() for stage, array in stages.items()}
    save_file(tensors, path, METADATA if metadata is None else metadata)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "capture.safetensors"


def test_a_capture_comes_back_as_it_was_written(path: Path) -> None:
    dense: dict[str, np.ndarray] = {
        "output": np.ones((3, 64), np.float32),
        "input": np.full((3, 64), np.nan, np.float16),
    }
    capture = Capture.open(write(path, {1: moe_stages(), 0: dense}))
    assert (capture.recipe, capture.engine, capture.rounding_order) == ("w4a8", "a test", "engine")
    assert list(capture.layers) == [0, 1]
    assert list(capture.layers[0]) == ["input", "output"]
    assert list(capture.layers[1]) == list(STAGES)
    assert capture.layers[0]["input"].dtype == np.float16
    assert np.isnan(capture.layers[0]["input"]).all()
    for stage, array in moe_stages().items():
        np.testing.assert_array_equal(capture.layers[1][stage], array)
    capture.check_against(CONFIG)


def test_ids_of_64_bits_come_back_in_32(path: Path) -> None:
    stages = moe_stages()
    stages["expert_ids"] = stages["expert_ids"].astype(np.int64)
    assert Capture.open(write(path, {1: stages})).layers[1]["expert_ids"].dtype == np.int32


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "input"])
def test_input_and_one_other_stage_are_enough(path: Path, stage: str) -> None:
    stages = {name: moe_stages()[name] for name in ("input", stage)}
    assert Capture.open(write(path, {7: stages})).layers[7].keys() == {"input", stage}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", None, "lack 'format'.*k3jax-capture-1.*docs/captures.md"),
        ("format", "k3jax-capture-9", "'format' is 'k3jax-capture-9'"),
        ("engine", None, "lack 'engine'"),
        ("recipe", "fp4", "'recipe' is 'fp4'; it must be 'bf16' or 'w4a16' or 'w4a8' or 'w4a8_fp8'"),
        ("recipe", None, "lack 'recipe'"),
        ("rounding_order", "Official", "'official' or 'engine'"),
    ],
)
def test_metadata_it_refuses(path: Path, key: str, value: str | None, message: str) -> None:
    metadata = {name: text for name, text in METADATA.items() if name != key} | ({key: value} if value else {})
    with pytest.raises(ValueError, match=message):
        Capture.open(write(path, {1: moe_stages()}, metadata))


@pytest.mark.parametrize(
    ("stage", "array", "message"),
    [
        (
            "logits",
            np.ones((3, 8), BF16),
            r"'layers\.1\.logits' is no known stage; the stages are input, router_logits",
        ),
        ("input.x", np.ones((3, 64), BF16), r"must be called layers\.N\.STAGE"),
        ("latent", np.ones((1, 3, 32), BF16), r"shape \[T, L\], tokens flattened: got \(1, 3, 32\)"),
        ("latent", np.ones((2, 32), BF16), r"latent has the shape \(2, 32\).*input T \(tokens\) is 3"),
        (
            "shared",
            np.ones((3, 32), BF16),
            r"shared has the shape \(3, 32\).*by the stage input D \(hidden size\) is 64",
        ),
        ("expert_weights", np.ones((3, 4), BF16), r"by the stage expert_ids X .* is 2"),
        ("latent", np.ones((3, 32), np.int32), "must be bfloat16 or float16 or float32 or float64: got int32"),
        ("expert_ids", np.ones((3, 2), np.float32), "must be int32 or int64: got float32"),
        ("expert_ids", np.full((3, 2), -2, np.int32), r"or -1 for none: got -2 \.\.\. -2"),
        ("expert_ids", np.full((3, 2), 2**40, np.int64), "got 1099511627776"),
        ("expert_ids", np.full((3, 2), 8, np.int32), "reaches 8, but router_logits has 8 experts"),
        ("expert_ids", np.ones((3, 0), np.int32), "by the stage|is empty"),
    ],
)
def test_tensors_it_refuses(path: Path, stage: str, array: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Capture.open(write(path, {1: moe_stages() | {stage: array}}))


def test_layers_it_refuses(path: Path) -> None:
    with pytest.raises(ValueError, match="layer 1 lacks the stage input"):
        Capture.open(write(path, {1: {"output": np.ones((3, 64), BF16)}}))
    with pytest.raises(ValueError, match="layer 1 has the stage input only"):
        Capture.open(write(path, {1: {"input": np.ones((3, 64), BF16)}}))
    with pytest.raises(ValueError, match="input is empty"):
        Capture.open(write(path, {1: {"input": np.ones((0, 64), BF16), "output": np.ones((0, 64), BF16)}}))
    with pytest.raises(ValueError, match="holds no tensors"):
        Capture.open(write(path, {}))


def test_no_file_and_no_safetensors_file(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Capture.open(path)
    path.write_bytes(b"PK\x03\x04 this is another kind of file")
    with pytest.raises(ValueError, match="safetensors"):
        Capture.open(path)


def test_a_capture_of_another_model(path: Path) -> None:
    capture = Capture.open(write(path, {1: moe_stages()}))
    with pytest.raises(ValueError, match=r"stage input has the shape \(3, 64\); the model's hidden size is 128"):
        capture.check_against(replace(CONFIG, hidden_size=128))
    with pytest.raises(ValueError, match="the model's experts per token is 4"):
        capture.check_against(replace(CONFIG, num_experts_per_token=4))
    with pytest.raises(ValueError, match="layer 1 does not exist"):
        capture.check_against(replace(CONFIG, num_hidden_layers=1))
    with pytest.raises(ValueError, match=r"no expert_ids or .* in the model"):
        capture.check_against(replace(CONFIG, first_k_dense_replace=2))
    with pytest.raises(ValueError, match="has no normed_latent in the model"):
        capture.check_against(replace(CONFIG, latent_moe_use_norm=False))
    ids_only = {name: moe_stages()[name] for name in ("input", "expert_ids")}
    with pytest.raises(ValueError, match="expert_ids reaches 7 of 4 experts"):
        Capture.open(write(path, {1: ids_only})).check_against(replace(CONFIG, num_experts=4))
