"""`load_layer`: every array where it belongs, in every recipe, from packed and from plain experts."""

import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_edits import Stored, edit_config, read_all, rewrite, tiny_checkpoint
from flax import nnx

from k3jax.checkpoint import Checkpoint, LayerTensors
from k3jax.checkpoint.synthetic import write_checkpoint
from k3jax.loading import load_layer
from k3jax.mlp import GatedMLP
from k3jax.moe import MoE
from k3jax.options import LoadOptions
from pallas_kernels import MXFP4Array, Situ, quantize_mxfp4

DATA = Path(__file__).parent / "data"
STEM = "block_sparse_moe."
HIDDEN, LATENT, WIDTH, EXPERTS = 96, 128, 32, 4
PACKED_RECIPES = ["w4a16", "w4a8", "w4a8_fp8"]
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path)


def moe_layer(folder: Path, **arguments: Any) -> MoE:
    layer = load_layer(folder, 1, **arguments)
    assert isinstance(layer, MoE)
    return layer


def values(variable: Any) -> np.ndarray:
    return np.asarray(variable.get_value())


def dequantized(tensors: LayerTensors, stem: str) -> np.ndarray:
    """float64 `[N, K]` from the format's definition."""
    codes, scales = tensors[f"{stem}.weight_packed"], tensors[f"{stem}.weight_scale"]
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
    signed = np.where(nibbles & 8, -1, 1) * MAGNITUDES[nibbles & 7]
    return signed * np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, axis=-1)


def test_a_dense_layer_is_a_gated_mlp(folder: Path) -> None:
    layer = load_layer(folder, 0)
    assert isinstance(layer, GatedMLP)
    tensors = Checkpoint.open(folder).read_layer(0)
    gate_up = values(layer.gate_up)
    np.testing.assert_array_equal(gate_up[0], tensors["mlp.gate_proj.weight"])
    np.testing.assert_array_equal(gate_up[1], tensors["mlp.up_proj.weight"])
    np.testing.assert_array_equal(values(layer.down), tensors["mlp.down_proj.weight"])
    assert layer.activation == Situ(4.0, 25.0)


@pytest.mark.parametrize("recipe", ["bf16", *PACKED_RECIPES])
def test_everything_but_the_experts_is_the_same_in_each_recipe(recipe: str, folder: Path) -> None:
    layer = moe_layer(folder, recipe=recipe)
    tensors = Checkpoint.open(folder).read_layer(1)
    assert layer.recipe == recipe
    found = {
        "gate.weight": layer.router.weight,
        "gate.e_score_correction_bias": layer.router.bias,
        "routed_expert_down_proj.weight": layer.latent_down,
        "routed_expert_norm.weight": layer.latent_norm,
        "routed_expert_up_proj.weight": layer.latent_up,
    }
    for name, variable in found.items():
        stored = tensors[f"{STEM}{name}"]
        assert values(variable).dtype == stored.dtype
        np.testing.assert_array_equal(values(variable), stored)
    assert layer.shared is not None
    gate_up = values(layer.shared.gate_up)
    np.testing.assert_array_equal(gate_up[0], tensors[f"{STEM}shared_experts.gate_proj.weight"])
    np.testing.assert_array_equal(gate_up[1], tensors[f"{STEM}shared_experts.up_proj.weight"])
    np.testing.assert_array_equal(values(layer.shared.down), tensors[f"{STEM}shared_experts.down_proj.weight"])


@pytest.mark.parametrize("recipe", PACKED_RECIPES)
def test_packed_experts_stay_as_they_are(recipe: str, folder: Path) -> None:
    layer = moe_layer(folder, recipe=recipe)
    tensors = Checkpoint.open(folder).read_layer(1)
    w13, w2 = layer.w13.get_value(), layer.w2.get_value()
    assert isinstance(w13, MXFP4Array)
    assert isinstance(w2, MXFP4Array)
    assert w13.shape == (EXPERTS, 2, WIDTH, LATENT)
    assert w2.shape == (EXPERTS, LATENT, WIDTH)
    for expert in range(EXPERTS):
        stem = f"{STEM}experts.{expert}."
        for kind, w13_part, w2_part in (("packed", w13.codes, w2.codes), ("scale", w13.scales, w2.scales)):
            np.testing.assert_array_equal(w13_part[expert, 0], tensors[f"{stem}w1.weight_{kind}"])
            np.testing.assert_array_equal(w13_part[expert, 1], tensors[f"{stem}w3.weight_{kind}"])
            np.testing.assert_array_equal(w2_part[expert], tensors[f"{stem}w2.weight_{kind}"])


def test_recipe_bf16_dequantises_packed_experts(folder: Path) -> None:
    layer = moe_layer(folder, recipe="bf16")
    tensors = Checkpoint.open(folder).read_layer(1)
    w13, w2 = values(layer.w13), values(layer.w2)
    assert w13.dtype == w2.dtype == ml_dtypes.bfloat16
    for expert in range(EXPERTS):
        stem = f"{STEM}experts.{expert}."
        np.testing.assert_array_equal(w13[expert, 0].astype(np.float64), dequantized(tensors, f"{stem}w1"))
        np.testing.assert_array_equal(w13[expert, 1].astype(np.float64), dequantized(tensors, f"{stem}w3"))
        np.testing.assert_array_equal(w2[expert].astype(np.float64), dequantized(tensors, f"{stem}w2"))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_recipe_bf16_takes_plain_experts(dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_checkpoint(tmp_path, plain_experts=dtype)
    with caplog.at_level(logging.INFO, logger="k3jax"):
        layer = moe_layer(folder, recipe="bf16")
    tensors = Checkpoint.open(folder).read_layer(1)
    w13, w2 = values(layer.w13), values(layer.w2)
    for expert in range(EXPERTS):
        w1, w3, down = (
            tensors[f"{STEM}experts.{expert}.{name}.weight"].astype(ml_dtypes.bfloat16) for name in ("w1", "w3", "w2")
        )
        np.testing.assert_array_equal(w13[expert], np.stack([w1, w3]))
        np.testing.assert_array_equal(w2[expert], down)
    said = [record.getMessage() for record in caplog.records if "rounded" in record.getMessage()]
    assert len(said) == (dtype != "BF16")
    assert all("layer 1: 12 tensors stored as float" in line for line in said)


@pytest.mark.parametrize("recipe", PACKED_RECIPES)
def test_plain_experts_are_quantised_only_when_asked(recipe: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, plain_experts="F32")
    with pytest.raises(ValueError, match=r"w1\.weight is stored plain, in float32.*quantize_plain=True"):
        load_layer(folder, 1, recipe=recipe)
    layer = moe_layer(folder, recipe=recipe, options=LoadOptions(quantize_plain=True))
    tensors = Checkpoint.open(folder).read_layer(1)
    for attribute, parts in (("w13", ("w1", "w3")), ("w2", ("w2",))):
        plain = np.stack(
            [
                np.stack([tensors[f"{STEM}experts.{expert}.{part}.weight"] for part in parts])
                for expert in range(EXPERTS)
            ]
        )
        plain = plain if len(parts) > 1 else plain[:, 0]
        expected = quantize_mxfp4(jnp.asarray(plain.astype(ml_dtypes.bfloat16)))
        found = getattr(layer, attribute).get_value()
        np.testing.assert_array_equal(found.codes, expected.codes)
        np.testing.assert_array_equal(found.scales, expected.scales)


def test_plain_dense_weights_of_other_dtypes_are_rounded_with_one_line(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = read_all(folder)

    def widen(tensors: Stored) -> None:
        for name, (dtype, array) in tensors.items():
            if dtype == "BF16":
                tensors[name] = ("F32", array.astype(np.float32) * np.float32(1 + 2**-10))

    rewrite(folder, widen)
    with caplog.at_level(logging.INFO, logger="k3jax"):
        layer = load_layer(folder, 0)
    assert isinstance(layer, GatedMLP)
    assert [record.getMessage() for record in caplog.records if "rounded" in record.getMessage()] == [
        f"{folder}: layer 0: 3 tensors stored as float32 are rounded to bfloat16"
    ]
    down = before["language_model.model.layers.0.mlp.down_proj.weight"][1]  # A quarter of a step away from these.
    np.testing.assert_array_equal(values(layer.down), down)
    assert moe_layer(folder).router.weight.get_value().dtype == jnp.bfloat16


def test_the_bias_keeps_differences_that_bf16_cannot_hold(folder: Path) -> None:
    bias = np.array([0.5, 0.5001, 0.5002, 0.5003], np.float32)

    def set_bias(tensors: Stored) -> None:
        tensors[f"language_model.model.layers.1.{STEM}gate.e_score_correction_bias"] = ("F32", bias)

    rewrite(folder, set_bias)
    layer = moe_layer(folder)
    np.testing.assert_array_equal(values(layer.router.bias), bias)
    zeros = jnp.zeros((1, HIDDEN), jnp.bfloat16)  # All scores are equal, so the bias alone decides.
    assert layer.route(zeros).ids.tolist() == [[3, 2]]


def test_a_loaded_layer_outlives_its_files(folder: Path) -> None:
    layer = moe_layer(folder)

    def arrays() -> Any:
        return nnx.to_pure_dict(nnx.state(layer))

    before = jax.tree.map(np.array, arrays())
    for path in folder.glob("*.safetensors"):
        size = path.stat().st_size
        with path.open("r+b") as file:  # In place, under the maps that the loading made.
            file.seek(size // 8)
            file.write(b"\xff" * (size - size // 8))
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, arrays()))


def test_a_loaded_layer_computes(folder: Path) -> None:
    x = jax.random.normal(jax.random.key(0), (3, 5, HIDDEN), jnp.bfloat16)
    for index in (0, 1):
        y = load_layer(folder, index, recipe="bf16")(x)
        assert y.shape == x.shape
        assert bool(jnp.all(jnp.isfinite(y)))
        assert 0.2 < float(jnp.std(y.astype(jnp.float32))) < 5


def test_w4a16_and_bf16_are_the_same_numbers(folder: Path) -> None:
    x = jax.random.normal(jax.random.key(1), (16, HIDDEN), jnp.bfloat16)
    packed, plain = (moe_layer(folder, recipe=recipe)(x) for recipe in ("w4a16", "bf16"))
    difference = jnp.linalg.norm((packed - plain).astype(jnp.float32)) / jnp.linalg.norm(plain.astype(jnp.float32))
    assert float(difference) < 2e-3


def test_a_config_without_latent_and_shared_experts(tmp_path: Path) -> None:
    published = json.loads((DATA / "k3-config.json").read_bytes())
    published["text_config"] |= {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 32,
        "routed_expert_hidden_size": None,
        "latent_moe_use_norm": False,
        "num_shared_experts": 0,
    }
    layer = moe_layer(write_checkpoint(tmp_path / "x", published))
    assert layer.latent_down is layer.latent_up is layer.latent_norm is layer.shared is None
    assert layer.w13.get_value().shape == (4, 2, 32, 64)


@pytest.mark.parametrize(("config", "plain"), [("k3-config.json", None), ("k3-0.40b-config.json", "F32")])
def test_both_published_configs_load_at_small_sizes(config: str, plain: str | None, tmp_path: Path) -> None:
    published = json.loads((DATA / config).read_bytes())
    published["text_config"] |= {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 32,
        "routed_expert_hidden_size": 32,
    }
    folder = write_checkpoint(tmp_path / "x", published, plain_experts=plain)
    assert isinstance(load_layer(folder, 0, recipe="bf16"), GatedMLP)
    layer = moe_layer(folder, recipe="bf16")
    assert layer.config.activation == Situ(4.0, 25.0)
    assert layer(jnp.ones((2, 64), jnp.bfloat16)).shape == (2, 64)


def test_bad_arguments(folder: Path) -> None:
    with pytest.raises(ValueError, match="recipe='w8a8' is not one of bf16, w4a16"):
        load_layer(folder, 0, recipe="w8a8")
    with pytest.raises(ValueError, match="layer=2"):
        load_layer(folder, 2)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        load_layer(folder / "nothing", 0)
    edit_config(folder, {"num_experts": 5})
    with pytest.raises(ValueError, match=r"missing 'block_sparse_moe\.experts\.4\.w1\.weight_packed'"):
        load_layer(folder, 1)
