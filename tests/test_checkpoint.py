"""One layer's tensors as stored; any that is not what the config says raises and is named (faults 8 and 24)."""

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from checkpoint_edits import PREFIX, Stored, edit_config, read_all, rewrite, tiny_checkpoint

from k3jax.checkpoint import CONFIG, Checkpoint

EXPERT = f"{PREFIX}experts.2.w3.weight_packed"
BIAS = f"{PREFIX}gate.e_score_correction_bias"
GATE = f"{PREFIX}gate.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path)


def test_reads_one_layer_as_stored(folder: Path) -> None:
    stored = read_all(folder)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.names.keys() == stored.keys()
    dense, moe = checkpoint.read_layer(0), checkpoint.read_layer(1)
    assert set(dense) == {"mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"}
    assert len(moe) == 8 + 6 * 4
    for layer, tensors in ((0, dense), (1, moe)):
        for suffix, tensor in tensors.items():
            np.testing.assert_array_equal(tensor, stored[f"language_model.model.layers.{layer}.{suffix}"][1])
            assert not tensor.flags.writeable
    assert moe["block_sparse_moe.gate.weight"].dtype == ml_dtypes.bfloat16
    assert moe["block_sparse_moe.gate.e_score_correction_bias"].dtype == np.float32


def test_the_library_reads_the_same_values(folder: Path) -> None:
    theirs = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load(path).items()}
    for suffix, tensor in Checkpoint.open(folder).read_layer(1).items():
        np.testing.assert_array_equal(tensor, theirs[f"language_model.model.layers.1.{suffix}"])


def load(path: Path) -> dict[str, np.ndarray]:
    return dict(safetensors.numpy.load_file(path))


def test_names_of_a_layer(folder: Path) -> None:
    names = Checkpoint.open(folder).layer_names(0)
    assert names["mlp.up_proj.weight"] == "language_model.model.layers.0.mlp.up_proj.weight"
    assert names["post_attention_layernorm.weight"] == "language_model.model.layers.0.post_attention_layernorm.weight"
    assert len(names) == 4


def test_a_single_file_without_an_index(folder: Path) -> None:
    before = {suffix: np.array(tensor) for suffix, tensor in Checkpoint.open(folder).read_layer(1).items()}
    rewrite(folder, lambda _: None)
    after = Checkpoint.open(folder).read_layer(1)
    assert after.keys() == before.keys()
    for suffix, tensor in after.items():
        np.testing.assert_array_equal(tensor, before[suffix])


def test_the_shorter_prefix_and_a_flat_config(folder: Path) -> None:
    def shorten(tensors: Stored) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("language_model.")] = tensors.pop(name)

    rewrite(folder, shorten)
    config = json.loads((folder / CONFIG).read_bytes())
    (folder / CONFIG).write_text(json.dumps(config["text_config"]))
    assert len(Checkpoint.open(folder).read_layer(1)) == 8 + 6 * 4


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_plain_experts_are_read_in_their_dtype(dtype: str, tmp_path: Path) -> None:
    tensors = Checkpoint.open(tiny_checkpoint(tmp_path, plain_experts=dtype)).read_layer(1)
    numpy_dtype = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}[dtype]
    assert tensors["block_sparse_moe.experts.3.w2.weight"].dtype == numpy_dtype
    assert len(tensors) == 8 + 3 * 4


def test_shards_of_other_layers_may_be_absent(folder: Path) -> None:
    (folder / "model-00001-of-000003.safetensors").unlink()
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.read_layer(1)
    with pytest.raises(FileNotFoundError, match="model-00001-of-000003"):
        checkpoint.read_layer(0)


def test_a_layer_out_of_range(folder: Path) -> None:
    for layer in (-1, 2):
        with pytest.raises(ValueError, match=f"layer={layer}"):
            Checkpoint.open(folder).read_layer(layer)


def renamed(tensors: Stored) -> None:
    tensors[EXPERT.replace("w3", "w4")] = tensors.pop(EXPERT)


def without_expert(tensors: Stored) -> None:
    for name in [name for name in tensors if ".experts.3." in name]:
        del tensors[name]


def unknown(tensors: Stored) -> None:
    tensors[f"{PREFIX}experts.2.w3.weight_zero_point"] = ("U8", np.zeros(1, np.uint8))


def unknown_outside_the_block(tensors: Stored) -> None:
    tensors["language_model.model.layers.1.adapter.weight"] = ("U8", np.zeros(1, np.uint8))


def mlp_in_a_moe_layer(tensors: Stored) -> None:
    tensors["language_model.model.layers.1.mlp.up_proj.weight"] = ("U8", np.zeros(1, np.uint8))


def wrong_dtype(tensors: Stored) -> None:
    tensors[EXPERT] = ("I8", tensors[EXPERT][1].view(np.int8))


def scale_as_e8m0(tensors: Stored) -> None:
    name = EXPERT.replace("packed", "scale")
    tensors[name] = ("F8_E8M0", tensors[name][1].view(ml_dtypes.float8_e8m0fnu))


def gate_as_f64(tensors: Stored) -> None:
    tensors[GATE] = ("F64", tensors[GATE][1].astype(np.float64))


def wrong_shape(tensors: Stored) -> None:
    tensors[EXPERT] = ("U8", tensors[EXPERT][1].T.copy())


def bias_as_bf16(tensors: Stored) -> None:
    tensors[BIAS] = ("BF16", tensors[BIAS][1].astype(ml_dtypes.bfloat16))


def bias_as_f16(tensors: Stored) -> None:
    tensors[BIAS] = ("F16", tensors[BIAS][1].astype(np.float16))


def bias_as_column(tensors: Stored) -> None:
    tensors[BIAS] = ("F32", tensors[BIAS][1][:, None])


def both_prefixes(tensors: Stored) -> None:
    tensors[GATE.removeprefix("language_model.")] = tensors[GATE]


def plain_as_well(tensors: Stored) -> None:
    tensors[EXPERT.replace("_packed", "")] = ("BF16", np.zeros((32, 128), ml_dtypes.bfloat16))


def one_expert_plain(tensors: Stored) -> None:
    stem = EXPERT.removesuffix("_packed")
    del tensors[EXPERT], tensors[f"{stem}_scale"]
    tensors[stem] = ("BF16", np.zeros((32, 128), ml_dtypes.bfloat16))


def scale_missing(tensors: Stored) -> None:
    del tensors[EXPERT.replace("packed", "scale")]


Edit = Callable[[Stored], None]
WRONG_TENSORS: dict[str, tuple[Edit, str]] = {
    "one key renamed": (
        renamed,
        r"missing '.*experts\.2\.w3\.weight_packed'; unknown '.*experts\.2\.w4\.weight_packed'",
    ),
    "one expert dropped": (without_expert, r"missing '.*experts\.3\.w1\.weight_packed', .* and 3 more"),
    "one unknown tensor": (unknown, r"unknown '.*experts\.2\.w3\.weight_zero_point'"),
    "one unknown beside the block": (unknown_outside_the_block, r"unknown '.*layers\.1\.adapter\.weight'"),
    "a dense MLP's tensor": (mlp_in_a_moe_layer, r"unknown '.*layers\.1\.mlp\.up_proj\.weight'"),
    "wrong dtype": (wrong_dtype, r"experts\.2\.w3\.weight_packed' has dtype I8, expected U8"),
    "scale of another dtype": (scale_as_e8m0, r"experts\.2\.w3\.weight_scale' has dtype F8_E8M0, expected U8"),
    "router of another dtype": (gate_as_f64, r"gate\.weight' has dtype F64, expected BF16 or F16 or F32"),
    "wrong shape": (wrong_shape, r"experts\.2\.w3\.weight_packed' has shape \(64, 32\), .* make it \(32, 64\)"),
    "bias in bf16": (bias_as_bf16, r"e_score_correction_bias' has dtype BF16, expected F32"),
    "bias in f16": (bias_as_f16, r"e_score_correction_bias' has dtype F16, expected F32"),
    "bias of rank 2": (
        bias_as_column,
        r"e_score_correction_bias' has shape \(4, 1\), the config's sizes make it \(4,\)",
    ),
    "under both prefixes": (both_prefixes, r"'block_sparse_moe\.gate\.weight' is there twice"),
    "plain and packed": (plain_as_well, r"experts\.2\.w3\.weight' is stored packed as well"),
    "one expert plain": (one_expert_plain, r"more than one way: .*experts\.2\.w3 plain, .* mxfp4"),
    "scale missing": (scale_missing, r"missing '.*experts\.2\.w3\.weight_scale'"),
}


@pytest.mark.parametrize("fault", WRONG_TENSORS)
def test_a_wrong_tensor_is_named(fault: str, folder: Path) -> None:
    edit, message = WRONG_TENSORS[fault]
    rewrite(folder, edit)
    with pytest.raises(ValueError, match=message) as caught:
        Checkpoint.open(folder).read_layer(1)
    assert str(folder) in str(caught.value)
    assert Checkpoint.open(folder).read_layer(0)  # The other layer is none the worse.


def test_a_packed_router_is_refused(folder: Path) -> None:
    def pack(tensors: Stored) -> None:
        rows, columns = tensors.pop(GATE)[1].shape
        tensors[f"{GATE}_packed"] = ("U8", np.zeros((rows, columns // 2), np.uint8))
        tensors[f"{GATE}_scale"] = ("U8", np.zeros((rows, columns // 32), np.uint8))

    rewrite(folder, pack)
    with pytest.raises(NotImplementedError, match=r"block_sparse_moe\.gate is packed; a router is read as BF16 or F16"):
        Checkpoint.open(folder).read_layer(1)


def test_the_config_s_sizes_decide(folder: Path) -> None:
    edit_config(folder, {"moe_intermediate_size": 64})
    with pytest.raises(ValueError, match=r"has shape \(64, 96\), the config's sizes make it \(128, 96\)"):
        Checkpoint.open(folder).read_layer(1)
