"""Synthetic checkpoints: the release's layout, the same bytes everywhere, values of order one, never half written."""

import hashlib
import itertools
import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoint_edits import tiny_checkpoint, tiny_config

from k3jax.checkpoint import CONFIG, INDEX, Checkpoint, synthetic, synthetic_values
from k3jax.checkpoint.safetensors_file import SafetensorsFile
from k3jax.checkpoint.synthetic import synthetic_config, write_checkpoint
from k3jax.config import K3Config

ROOT = Path(__file__).parent.parent
# Of the embedded checkpoint. A change here means that people's cached copies change: raise DEFAULT_NAME's version too.
DIGESTS = {
    "config.json": "9e7d71e4fd2a4355e8b356c7162f9cd285c2af2e430f89c61787c8001fc70105",
    "model-00001-of-000005.safetensors": "2656b87306287613e4dd33605c5ab8a44c260cc03f470985b2d2fdb8bda64908",
    "model-00002-of-000005.safetensors": "9c7dd0438c42ba5df55ec0a066967bc74902a4c1451be0d991f746ee9b324966",
    "model-00003-of-000005.safetensors": "e497220340a39d5429040cdc64812dab4915a4f89c1dba2225d3264f2be79e65",
    "model-00004-of-000005.safetensors": "2a3f3d67c1c93099926c9494cda189c5809cf85b1a865a7776d263cc79d17c1d",
    "model-00005-of-000005.safetensors": "8ebe78bd032d7f21843d73d67aa275f5ac62058b517c9ac4f952f15d0c422277",
    "model.safetensors.index.json": "97a6e92072d697e1a4fd340e957858fb7ce4579eb047771f225e8f153beed9e7",
}
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("synthetic") / "embedded", synthetic_config())


def test_the_embedded_checkpoint_is_the_same_to_the_byte(embedded: Path) -> None:
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in embedded.iterdir()}
    assert found == DIGESTS


def test_names_and_config_are_the_release_s(embedded: Path) -> None:
    data = ROOT / "tests" / "data"
    classes = {line.split("\t")[1] for line in (data / "k3-weight-classes.tsv").read_text().splitlines()}
    assert {re.sub(r"\.\d+\.", ".*.", name) for name in Checkpoint.open(embedded).names} <= classes
    released = json.loads((data / "k3-config.json").read_bytes())["text_config"]
    written = json.loads((embedded / CONFIG).read_bytes())["text_config"]
    sizes = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_experts", "num_experts_per_token"}
    sizes |= {"moe_intermediate_size", "routed_expert_hidden_size"}
    for key in written.keys() - sizes - {"quantization_config"}:
        assert written[key] == released[key], key
    assert written["quantization_config"]["format"] == released["quantization_config"]["format"]


def test_layers_lie_mostly_in_their_own_shard(embedded: Path) -> None:
    index = json.loads((embedded / INDEX).read_bytes())
    for name, file_name in index["weight_map"].items():
        layer = int(name.split(".")[3])
        spilled = name.endswith("e_score_correction_bias")
        assert file_name == f"model-{layer + 1 + spilled:05d}-of-000005.safetensors"
    files = [SafetensorsFile(path) for path in embedded.glob("*.safetensors")]
    assert index["metadata"]["total_size"] == sum(
        entry.end - entry.begin for f in files for entry in f.entries.values()
    )


def test_an_expert_s_six_tensors_are_contiguous(embedded: Path) -> None:
    entries = SafetensorsFile(embedded / "model-00002-of-000005.safetensors").entries
    for expert in range(32):
        stem = f"language_model.model.layers.1.block_sparse_moe.experts.{expert}."
        own = sorted((entry.begin, entry.end) for name, entry in entries.items() if name.startswith(stem))
        assert len(own) == 6
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(own))


def test_tensors_are_aligned(embedded: Path) -> None:
    for path in embedded.glob("*.safetensors"):
        assert all(tensor.flags.aligned for tensor in SafetensorsFile(path).values())


def test_biases_are_distinct_but_close(embedded: Path) -> None:
    bias = np.sort(Checkpoint.open(embedded).read_layer(2)["block_sparse_moe.gate.e_score_correction_bias"])
    assert 0.005 < bias.std() < 0.02
    gaps = np.diff(bias)
    assert gaps.min() > 0
    assert gaps.min() < 1e-4  # Close enough that rounding to bfloat16 could exchange neighbours.


def test_codes_are_a_quantised_normal_and_scales_vary(embedded: Path) -> None:
    tensors = Checkpoint.open(embedded).read_layer(1)
    codes = np.concatenate([t.ravel() for suffix, t in tensors.items() if suffix.endswith("weight_packed")])
    nibbles = np.concatenate([codes & 15, codes >> 4])
    values = np.where(nibbles & 8, -1, 1) * MAGNITUDES[nibbles & 7]
    assert abs(values.mean()) < 0.02
    assert abs(values.std() - synthetic_values.CODES_RMS) < 0.02
    assert len(np.unique(codes)) == 256
    scales = [tensor for suffix, tensor in tensors.items() if suffix.endswith("w1.weight_scale")]
    assert all(len(np.unique(scale)) == 3 for scale in scales)
    assert len({scale.tobytes() for scale in scales}) == len(scales)


def test_scale_bytes_at_the_release_s_widths_are_in_the_range_seen_there() -> None:
    values = synthetic._Values(K3Config.from_dict(synthetic_config(latent_size=3584, expert_width=3072)), seed=0)
    for part, shape in (("w1", (96, 112)), ("w2", (112, 96))):
        tensor = synthetic.NewTensor(f"experts.0.{part}.weight_scale", "U8", shape)
        (scales,) = values.of(tensor)
        assert scales.min() >= 112
        assert scales.max() <= 122


def test_every_stage_has_values_of_order_one(embedded: Path) -> None:
    """In plain NumPy, from the formulas."""
    tensors = Checkpoint.open(embedded).read_layer(1)
    stem = "block_sparse_moe."

    def matrix(name: str) -> np.ndarray:
        if f"{stem}{name}.weight" in tensors:
            return tensors[f"{stem}{name}.weight"].astype(np.float64)
        codes, scales = (tensors[f"{stem}{name}.weight_{kind}"] for kind in ("packed", "scale"))
        nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
        values = np.where(nibbles & 8, -1, 1) * MAGNITUDES[nibbles & 7]
        return values * np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, axis=-1)

    x = np.random.default_rng(0).standard_normal((200, 512))
    latent = x @ matrix("routed_expert_down_proj").T
    gate, up = latent @ matrix("experts.5.w1").T, latent @ matrix("experts.5.w3").T
    hidden = 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * 25 * np.tanh(up / 25)
    stages = {
        "logits": x @ matrix("gate").T,
        "latent": latent,
        "gate": gate,
        "up": up,
        "hidden": hidden,
        "expert, averaged over 4": hidden @ matrix("experts.5.w2").T / 2,
        "up-projection": x[:, :256] @ matrix("routed_expert_up_proj").T,
        "shared gate": x @ matrix("shared_experts.gate_proj").T,
    }
    for stage, value in stages.items():
        assert 0.5 < np.sqrt(np.mean(value**2)) < 2, stage


def test_a_seed_changes_every_weight_and_nothing_else(tmp_path: Path) -> None:
    folders = [write_checkpoint(tmp_path / str(seed), tiny_config(), seed=seed) for seed in (0, 1)]
    first, second = (Checkpoint.open(folder).read_layer(1) for folder in folders)
    assert first.keys() == second.keys()
    assert all(tensor.tobytes() != second[suffix].tobytes() for suffix, tensor in first.items())
    assert (folders[0] / INDEX).read_bytes() == (folders[1] / INDEX).read_bytes()


def test_a_tensor_s_values_do_not_depend_on_the_others(tmp_path: Path) -> None:
    small = Checkpoint.open(write_checkpoint(tmp_path / "small", tiny_config())).read_layer(1)
    large = Checkpoint.open(write_checkpoint(tmp_path / "large", tiny_config(num_experts=8, layers=3))).read_layer(1)
    name = "block_sparse_moe.experts.3.w2.weight_packed"
    np.testing.assert_array_equal(small[name], large[name])


def test_chunks_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = np.concatenate(list(synthetic_values.packed_codes(0, "x", 1001)))
    monkeypatch.setattr(synthetic_values, "CHUNK", 16)
    chunks = list(synthetic_values.packed_codes(0, "x", 1001))
    assert len(chunks) > 60
    np.testing.assert_array_equal(np.concatenate(chunks), whole)


def test_bf16_is_rounded_to_nearest_even() -> None:
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8 - 2**-20, 3.0e38, 1e-40, 0.0])
    rounded = synthetic_values._rounded(values, "BF16")
    np.testing.assert_array_equal(rounded, values.astype(np.float32).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_plain_experts(dtype: str, tmp_path: Path) -> None:
    tensors = Checkpoint.open(tiny_checkpoint(tmp_path, plain_experts=dtype)).read_layer(1)
    experts = [tensor for suffix, tensor in tensors.items() if ".experts." in suffix]
    assert len(experts) == 12
    assert all(0.05 < tensor.astype(np.float32).std() < 0.5 for tensor in experts)


def test_progress_counts_bytes_to_the_end(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_checkpoint(tmp_path / "x", tiny_config(), progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == json.loads((tmp_path / "x" / INDEX).read_bytes())["metadata"]["total_size"]


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "x", tiny_config(), progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="exists"):
        write_checkpoint(tmp_path, tiny_config())
    with pytest.raises(ValueError, match="plain_experts='F64'"):
        write_checkpoint(tmp_path / "x", tiny_config(), plain_experts="F64")
    with pytest.raises(ValueError, match="num_experts_per_token"):
        write_checkpoint(tmp_path / "x", tiny_config(top_k=5))
    assert list(tmp_path.iterdir()) == []
