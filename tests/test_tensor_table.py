"""The table of tensors, against the release's names and sizes as they were published."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_edits import tiny_config

from k3jax.checkpoint.tensor_table import TensorSpec, classify, layer_table, out_of_scope_class, split_name
from k3jax.config import K3Config

DATA = Path(__file__).parent / "data"
MOE = "block_sparse_moe."
RELEASED_NAMES = 497_220
PLAIN = ("BF16", "F16", "F32")


def release_values() -> dict[str, Any]:
    values = json.loads((DATA / "k3-config.json").read_bytes())
    assert isinstance(values, dict)
    return values


def class_layers(pattern: str, text: dict[str, Any]) -> list[int]:
    """The 0-based layers that have tensors of this class."""
    everywhere = list(range(text["num_hidden_layers"]))
    if ".mlp." in pattern:
        return everywhere[: text["first_k_dense_replace"]]
    if "block_sparse_moe" in pattern:
        return everywhere[text["first_k_dense_replace"] :]
    part = pattern.partition("self_attn.")[2]
    if not part or part in ("g_proj.weight", "o_proj.weight"):
        return everywhere
    kind = "full_attn_layers" if part.startswith(("kv_", "q_a_", "q_b_")) else "kda_layers"
    return [layer - 1 for layer in text["linear_attn_config"][kind]]


def expanded(pattern: str, count: int, text: dict[str, Any]) -> Iterator[str]:
    """The names of one published class, its `*` filled in."""
    parts = pattern.split("*")
    if "model.layers" in pattern:
        for layer in class_layers(pattern, text):
            if len(parts) == 2:
                yield f"{parts[0]}{layer}{parts[1]}"
            else:
                yield from (f"{parts[0]}{layer}{parts[1]}{expert}{parts[2]}" for expert in range(text["num_experts"]))
    elif len(parts) == 2:
        yield from (f"{parts[0]}{number}{parts[1]}" for number in range(count))
    else:
        yield pattern


def release_names() -> list[str]:
    text = release_values()["text_config"]
    names = []
    for line in (DATA / "k3-weight-classes.tsv").read_text().splitlines():
        count, pattern = line.split("\t")
        of_class = list(expanded(pattern, int(count), text))
        assert len(of_class) == int(count), pattern
        names += of_class
    return names


@pytest.fixture(scope="module")
def names() -> list[str]:
    return release_names()


def test_every_name_of_the_release_has_one_class(names: list[str]) -> None:
    assert len(names) == len(set(names)) == RELEASED_NAMES
    config = K3Config.from_dict(release_values())
    start = time.process_time()
    inventory = classify(names, config)
    assert time.process_time() - start < 60  # seconds on a slow machine; what is not linear takes hours
    assert inventory.unknown == []
    assert inventory.doubled == []
    assert inventory.missing == {}
    counts = {label: len(of_class) for label, of_class in inventory.out_of_scope.items()}
    attention = 2 * 93 + 12 * 69 + 6 * 24
    vision = 6 * 27 + 2 + 1 + 3
    assert counts == {
        "attention": attention,
        "norm": 2 * 93 + 1,
        "attention residual": 4 * 93 + 2,
        "embedding": 2,
        "vision": vision,
    }
    classed = [name for suffixes in inventory.mlp.values() for name in suffixes.values()]
    assert len(classed) == 3 + 92 * (8 + 6 * 896)
    assert sorted(classed + [name for of_class in inventory.out_of_scope.values() for name in of_class]) == sorted(
        names
    )


def test_what_is_wrong_with_a_large_index_is_found(names: list[str]) -> None:
    prefix = "language_model.model.layers."
    lost = f"{prefix}57.{MOE}experts.895.w2.weight_scale"
    strange = [
        f"{prefix}57.{MOE}experts.896.w2.weight_scale",
        f"{prefix}57.{MOE}experts.07.w2.weight_scale",
        f"{prefix}57.mlp.gate_proj.weight",
        f"{prefix}93.input_layernorm.weight",
        f"{prefix}05.input_layernorm.weight",
        f"{prefix}0.input_layernorm.weight\n",
        "lm_head.bias",
    ]
    doubled = [f"model.layers.3.{MOE}gate.weight", f"{prefix}3.{MOE}gate.weight"]
    plain_too = f"{prefix}4.{MOE}experts.7.w1.weight"
    edited = [name for name in names if name != lost] + strange + doubled[:1] + [plain_too]
    inventory = classify(edited, K3Config.from_dict(release_values()))
    assert sorted(inventory.unknown) == sorted(strange)
    assert sorted(inventory.doubled) == sorted([*doubled, plain_too])
    assert inventory.missing == {57: [f"{MOE}experts.895.w2.weight_scale"]}
    assert "layers.7." not in str(inventory.missing)


def test_of_an_empty_index_each_layer_misses_what_its_kind_has() -> None:
    missing = classify([], K3Config.from_dict(tiny_config(layers=3))).missing
    assert missing[0] == ["mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"]
    assert missing[1] == missing[2]
    assert len(missing[1]) == 8 + 6 * 4


def test_the_release_s_shapes() -> None:
    config = K3Config.from_dict(release_values())
    dense = {
        "mlp.gate_proj.weight": (33792, 7168),
        "mlp.up_proj.weight": (33792, 7168),
        "mlp.down_proj.weight": (7168, 33792),
    }
    assert layer_table(config, 0, set()).specs == {name: TensorSpec(PLAIN, shape) for name, shape in dense.items()}
    specs = layer_table(config, 92, set()).specs
    moe = {
        "gate.weight": (896, 7168),
        "routed_expert_down_proj.weight": (3584, 7168),
        "routed_expert_norm.weight": (3584,),
        "routed_expert_up_proj.weight": (7168, 3584),
        "shared_experts.gate_proj.weight": (6144, 7168),
        "shared_experts.up_proj.weight": (6144, 7168),
        "shared_experts.down_proj.weight": (7168, 6144),
    }
    expected = {f"{MOE}{name}": TensorSpec(PLAIN, shape) for name, shape in moe.items()}
    expected[f"{MOE}gate.e_score_correction_bias"] = TensorSpec(("F32",), (896,))
    for expert in range(896):
        for name in ("w1", "w3"):
            expected[f"{MOE}experts.{expert}.{name}.weight_packed"] = TensorSpec(("U8",), (3072, 1792))
            expected[f"{MOE}experts.{expert}.{name}.weight_scale"] = TensorSpec(("U8",), (3072, 112))
        expected[f"{MOE}experts.{expert}.w2.weight_packed"] = TensorSpec(("U8",), (3584, 1536))
        expected[f"{MOE}experts.{expert}.w2.weight_scale"] = TensorSpec(("U8",), (3584, 96))
    assert specs == expected


def test_the_miniature_s_experts_are_plain() -> None:
    config = K3Config.from_pretrained(DATA / "k3-0.40b-config.json")
    specs = layer_table(config, 1, set()).specs
    assert specs[f"{MOE}experts.7.w1.weight"] == TensorSpec(PLAIN, (256, 512))
    assert specs[f"{MOE}experts.7.w2.weight"] == TensorSpec(PLAIN, (512, 256))
    assert len(specs) == 8 + 3 * 8


def test_the_names_decide_how_an_expert_is_stored_not_the_config() -> None:
    released = K3Config.from_dict(tiny_config())
    present = {f"{MOE}experts.{e}.{w}.weight" for e in range(4) for w in ("w1", "w2", "w3")}
    specs = layer_table(released, 1, present).specs
    assert present < specs.keys()
    assert not any(suffix.endswith("packed") for suffix in specs)
    unquantized = tiny_config()
    del unquantized["text_config"]["quantization_config"]
    one = {f"{MOE}experts.2.w1.weight_packed"}
    specs = layer_table(K3Config.from_dict(unquantized), 1, one).specs
    assert sum(suffix.endswith("weight_packed") for suffix in specs) == 12  # The others are asked for in the same way.


def test_dense_weights_stored_packed_are_known_but_apart() -> None:
    shared = f"{MOE}shared_experts.up_proj.weight"
    specs = layer_table(K3Config.from_dict(tiny_config()), 1, {f"{shared}_packed", f"{shared}_scale"}).specs
    assert shared not in specs
    assert specs[f"{shared}_packed"] == TensorSpec(("U8",), (64, 48))
    assert specs[f"{shared}_scale"] == TensorSpec(("U8",), (64, 3))


def test_parts_that_a_config_lacks_are_not_expected() -> None:
    values = tiny_config(shared_experts=0)
    values["text_config"] |= {"routed_expert_hidden_size": None, "latent_moe_use_norm": False}
    specs = layer_table(K3Config.from_dict(values), 1, set()).specs
    others = {suffix for suffix in specs if "experts." not in suffix}
    assert others == {f"{MOE}gate.weight", f"{MOE}gate.e_score_correction_bias"}
    assert specs[f"{MOE}experts.0.w2.weight_packed"].shape == (96, 16)


def test_a_hostile_config_cannot_make_the_table_grow() -> None:
    config = K3Config.from_dict(tiny_config(num_experts=10**12))
    with pytest.raises(ValueError, match="num_experts=1000000000000"):
        layer_table(config, 1, set())
    with pytest.raises(ValueError, match=f"num_hidden_layers={10**9}"):
        classify([], K3Config.from_dict(tiny_config(layers=10**9)))


def test_widths_that_blocks_do_not_divide() -> None:
    config = K3Config.from_dict(tiny_config(expert_width=48))
    with pytest.raises(ValueError, match=r"experts\.0\.w2 must be packed, but its input width 48"):
        layer_table(config, 1, set())
    assert layer_table(config, 1, {f"{MOE}experts.0.w1.weight"}).specs[f"{MOE}experts.0.w2.weight"].shape == (128, 48)


@pytest.mark.parametrize(
    ("name", "located"),
    [
        ("language_model.model.layers.12.mlp.up_proj.weight", (12, "mlp.up_proj.weight")),
        ("model.layers.0.x", (0, "x")),
        ("model.layers.01.x", None),
        ("model.layers.-1.x", None),
        ("model.layers.1.", None),
        ("xmodel.layers.1.x", None),
        ("language_model.language_model.model.layers.1.x", None),
        ("model.layers.99999999999999999999.x", None),
        ("model.layers.²3.x", None),
    ],
)
def test_split_name(name: str, located: tuple[int, str] | None) -> None:
    assert split_name(name) == located


def test_out_of_scope_class() -> None:
    assert out_of_scope_class("self_attn.q_proj.weight") == "attention"
    assert out_of_scope_class("input_layernorm.weight") == "norm"
    assert out_of_scope_class("mlp_res_proj.weight") == "attention residual"
    for suffix in ("mlp.gate_proj.weight", f"{MOE}gate.weight", "input_layernorm.bias", "self_attn", "extra.weight"):
        assert out_of_scope_class(suffix) is None
