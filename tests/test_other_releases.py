"""Checkpoints that others derived from the release: dense weights packed, experts in NVFP4, fewer, a flat config."""

import json
import logging
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_edits import PREFIX, Stored, edit_config, read_all, rewrite, tiny_checkpoint
from numerics import assert_same_bits

from k3jax import load_layer
from k3jax.checkpoint import CONFIG, Checkpoint
from k3jax.compare import compare_layer
from k3jax.compare.run import unit_normal
from k3jax.inspection import inspect_checkpoint
from k3jax.loading import LoadOptions
from k3jax.mlp import GatedMLP
from k3jax.moe import MoE
from pallas_kernels import dequantize_nvfp4, quantize_mxfp4
from sharding.mesh import MeshSizes

DENSE = "language_model.model.layers.0.mlp."
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SEED = 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path)


def agrees_with_the_oracle(folder: Path, layer: int, recipe: str, options: LoadOptions | None = None) -> MoE | GatedMLP:
    checkpoint = Checkpoint.open(folder)
    loaded = load_layer(folder, layer, recipe=recipe, options=options or LoadOptions())
    x = unit_normal(16, checkpoint.config.hidden_size, SEED)
    result = compare_layer(loaded, checkpoint.config, checkpoint.read_layer(layer), x, index=layer, recipe=recipe)
    assert result.ok, result.first_divergence
    return loaded


def pack_dense(tensors: Stored) -> None:
    """Shared experts, latent projections and the dense layer's MLP in MXFP4, as one derived checkpoint has them."""
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        packed = quantize_mxfp4(jnp.asarray(tensors.pop(name)[1]))
        tensors[f"{name}_packed"] = ("U8", np.asarray(packed.codes))
        tensors[f"{name}_scale"] = ("U8", np.asarray(packed.scales))


@pytest.mark.parametrize("recipe", ["bf16", "w4a16"])
def test_packed_dense_weights(folder: Path, recipe: str) -> None:
    rewrite(folder, pack_dense)
    moe = agrees_with_the_oracle(folder, 1, recipe)
    dense = agrees_with_the_oracle(folder, 0, recipe)
    stored = read_all(folder)
    assert isinstance(moe, MoE)
    assert isinstance(dense, GatedMLP)
    assert moe.latent_up is not None
    for name, weight in (
        (f"{PREFIX}routed_expert_up_proj", moe.latent_up[...]),
        (f"{DENSE}gate_proj", dense.gate_up[0]),
    ):
        codes, scales = (stored[f"{name}.weight_{part}"][1] for part in ("packed", "scale"))
        nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)
        expected = E2M1[nibbles] * np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, -1)
        np.testing.assert_array_equal(np.asarray(weight).astype(np.float64), expected)
    assert inspect_checkpoint(folder, MeshSizes()).problems.ok


def to_nvfp4(tensors: Stored) -> None:
    """Random experts as NVIDIA's tool stores them, in values of about the release's size."""
    rng = np.random.default_rng(SEED)
    for name in [name for name in tensors if ".experts." in name and name.endswith(".weight_packed")]:
        stem = name.removesuffix(".weight_packed")
        rows, half = tensors.pop(name)[1].shape
        del tensors[f"{stem}.weight_scale"]
        scales = rng.uniform(16, 448, (rows, half // 8)).astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{stem}.weight"] = ("U8", rng.integers(0, 256, (rows, half), np.uint8))
        tensors[f"{stem}.weight_scale"] = ("F8_E4M3", scales)
        tensors[f"{stem}.weight_scale_2"] = ("F32", np.array(rng.uniform(1e-4, 2e-4), np.float32))
        tensors[f"{stem}.input_scale"] = ("F32", np.array([0.01], np.float32))


def test_the_nvfp4_release_runs_in_bf16(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    rewrite(folder, to_nvfp4)
    edit_config(folder, {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}})
    with caplog.at_level(logging.WARNING, logger="k3jax"):
        layer = agrees_with_the_oracle(folder, 1, "bf16")
    assert "layer 1: 12 tensors stored as NVFP4 are rounded to bfloat16" in caplog.text
    tensors = read_all(folder)
    w3 = f"{PREFIX}experts.2.w3"
    codes, scales, scale = (tensors[f"{w3}.{part}"][1] for part in ("weight", "weight_scale", "weight_scale_2"))
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)
    exact = E2M1[nibbles] * np.repeat(scales.astype(np.float64), 16, -1) * np.float64(scale)
    assert isinstance(layer, MoE)
    found = np.asarray(layer.w13[2, 1]).astype(np.float64)
    np.testing.assert_allclose(found, exact, rtol=2**-8)
    assert np.abs(found / np.where(exact == 0, 1, exact)).max() < 1.01
    assert inspect_checkpoint(folder, MeshSizes()).problems.ok


def test_nvfp4_experts_become_mxfp4_only_when_asked(folder: Path) -> None:
    rewrite(folder, to_nvfp4)
    with pytest.raises(ValueError, match=r"w1\.weight is stored in NVFP4.*quantize_plain=True"):
        load_layer(folder, 1, recipe="w4a16")
    agrees_with_the_oracle(folder, 1, "w4a16", LoadOptions(quantize_plain=True))


@pytest.mark.parametrize("part", ["weight", "weight_scale", "weight_scale_2"])
def test_an_nvfp4_weight_with_a_part_missing(folder: Path, part: str) -> None:
    rewrite(folder, to_nvfp4)
    rewrite(folder, lambda tensors: tensors.__delitem__(f"{PREFIX}experts.2.w3.{part}"))
    with pytest.raises(ValueError, match=rf"missing .*experts\.2\.w3\.{part}'|stored in more than one way"):
        Checkpoint.open(folder).read_layer(1)


def test_every_nvfp4_code_and_scale() -> None:
    """All 16 codes under all 256 scale bytes, against the definition in float64."""
    codes = np.tile(np.arange(0, 256, 17, dtype=np.uint8) ^ 0x10, (256, 1))  # low nibble i, high nibble i ^ 1
    scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    scale = np.float32(1.7)
    found = dequantize_nvfp4(codes, np.stack([scales, scales], -1), scale)
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(256, 32)
    exact = E2M1[nibbles] * scales.astype(np.float64)[:, None] * np.float64(scale)
    assert_same_bits(found, exact.astype(np.float32).astype(ml_dtypes.bfloat16))
    with pytest.raises(ValueError, match="need float8_e4m3fn scales"):
        dequantize_nvfp4(codes, np.ones((256, 1), ml_dtypes.float8_e4m3fn), scale)


def test_a_pruned_checkpoint_with_a_flat_config(folder: Path) -> None:
    """Three of four experts kept; names without the outer prefix; the text config at the top level."""
    kept = [0, 1, 3]

    def prune(tensors: Stored) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            dtype, tensor = tensors.pop(name)
            expert = int(name.split(".experts.")[1].partition(".")[0])
            if expert in kept:
                tensors[name.replace(f".experts.{expert}.", f".experts.{kept.index(expert)}.")] = (dtype, tensor)
        for name in (f"{PREFIX}gate.weight", f"{PREFIX}gate.e_score_correction_bias"):
            tensors[name] = (tensors[name][0], tensors[name][1][kept])
        for name in list(tensors):
            tensors[name.removeprefix("language_model.")] = tensors.pop(name)

    rewrite(folder, prune)
    with pytest.raises(ValueError, match=r"missing .*experts\.3\.w1"):
        load_layer(folder, 1)
    config = json.loads((folder / CONFIG).read_bytes())["text_config"]
    (folder / CONFIG).write_text(json.dumps(config | {"num_experts": 3}))
    agrees_with_the_oracle(folder, 1, "w4a16")
    assert inspect_checkpoint(folder, MeshSizes()).problems.ok
