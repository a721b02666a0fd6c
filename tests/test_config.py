"""K3Config: the public configs, every documented alias and default, and an error for whatever is not implemented."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from annotations import unchecked_annotations

from k3jax import K3Config
from pallas_kernels import Situ, SwiGLU

DATA = Path(__file__).parent / "data"


@pytest.fixture(autouse=True)
def json_holds_anything() -> Iterator[None]:
    with unchecked_annotations():
        yield


@pytest.fixture
def released() -> dict[str, Any]:
    return json.loads((DATA / "k3-config.json").read_text())


def edited(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The config with fields of its `text_config` replaced; a value of `...` removes the field."""
    config = copy.deepcopy(config)
    for name, value in changes.items():
        if value is ...:
            del config["text_config"][name]
        else:
            config["text_config"][name] = value
    return config


def test_the_released_config() -> None:
    config = K3Config.from_pretrained(DATA / "k3-config.json")
    assert config == K3Config(
        hidden_size=7168,
        intermediate_size=33792,
        num_hidden_layers=93,
        activation=Situ(4.0, 25.0),
        rms_norm_eps=1e-5,
        first_k_dense_replace=1,
        num_experts=896,
        num_experts_per_token=16,
        moe_intermediate_size=3072,
        num_shared_experts=2,
        routed_expert_hidden_size=3584,
        latent_moe_use_norm=True,
        quantization="mxfp4",
    )
    assert (config.latent_size, config.shared_intermediate_size) == (3584, 6144)
    assert [config.is_moe(layer) for layer in (0, 1, 92)] == [False, True, True]


def test_the_public_miniature_has_plain_experts() -> None:
    config = K3Config.from_pretrained(DATA / "k3-0.40b-config.json")
    assert (config.num_experts, config.num_experts_per_token, config.quantization) == (8, 2, None)
    assert (config.latent_size, config.shared_intermediate_size) == (512, 256)


def test_a_flat_config_reads_like_a_nested_one(released: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(released["text_config"]))
    assert K3Config.from_pretrained(tmp_path) == K3Config.from_dict(released)


@pytest.mark.parametrize(
    ("name", "alias"),
    [
        ("num_expert_group", "n_group"),
        ("moe_router_activation_func", "scoring_func"),
        ("moe_renormalize", "norm_topk_prob"),
        ("num_experts_per_token", "num_experts_per_tok"),
        ("routed_expert_hidden_size", "moe_latent_size"),
    ],
)
def test_aliases(released: dict[str, Any], name: str, alias: str) -> None:
    value = released["text_config"][name]
    assert K3Config.from_dict(edited(released, **{name: ..., alias: value})) == K3Config.from_dict(released)
    with pytest.raises(ValueError, match=f"{name}.*{alias}.*disagree"):
        K3Config.from_dict(edited(released, **{alias: "another"}))


def test_defaults_of_missing_keys(released: dict[str, Any]) -> None:
    missing = (
        "moe_renormalize",
        "moe_router_activation_func",
        "num_shared_experts",
        "routed_scaling_factor",
        "first_k_dense_replace",
        "moe_layer_freq",
        "num_expert_group",
        "topk_group",
        "latent_moe_use_norm",
        "routed_expert_hidden_size",
        "rms_norm_eps",
        "quantization_config",
    )
    config = K3Config.from_dict(edited(released, **dict.fromkeys(missing, ...)))
    assert (config.renormalize, config.router_activation, config.num_shared_experts) == (True, "sigmoid", 0)
    assert (config.routed_scaling_factor, config.first_k_dense_replace, config.moe_layer_freq) == (1.0, 0, 1)
    assert (config.num_expert_group, config.topk_group, config.latent_moe_use_norm) == (1, 1, False)
    assert (config.routed_expert_hidden_size, config.latent_size, config.rms_norm_eps) == (None, 7168, 1e-6)
    assert config.quantization is None
    assert config.is_moe(0)


def test_moe_layers_come_after_the_dense_ones_and_every_so_often(released: dict[str, Any]) -> None:
    config = K3Config.from_dict(edited(released, first_k_dense_replace=2, moe_layer_freq=3))
    assert [layer for layer in range(10) if config.is_moe(layer)] == [3, 6, 9]
    for layer in (-1, 93):
        with pytest.raises(ValueError, match="layers 0 to 92"):
            config.is_moe(layer)


def test_a_model_without_experts_is_all_dense(released: dict[str, Any]) -> None:
    config = K3Config.from_dict(edited(released, num_experts=None))
    assert not any(config.is_moe(layer) for layer in range(93))


def test_activations(released: dict[str, Any]) -> None:
    assert K3Config.from_dict(edited(released, hidden_act="silu")).activation == SwiGLU()
    identity_up = K3Config.from_dict(edited(released, activation_situ_linear_beta=None))
    assert identity_up.activation == Situ(4.0, None)
    assert K3Config.from_dict(
        edited(released, activation_situ_beta=5, activation_situ_linear_beta=20)
    ).activation == Situ(5, 20)


@pytest.mark.parametrize("key", ["hidden_act", "activation_situ_beta", "activation_situ_linear_beta"])
def test_no_activation_is_assumed(released: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} is missing"):
        K3Config.from_dict(edited(released, **{key: ...}))


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("hidden_act", "gelu", NotImplementedError),
        ("moe_router_activation_func", "tanh", NotImplementedError),
        ("topk_method", "greedy", NotImplementedError),
        ("mlp_bias", True, NotImplementedError),
        ("activation_situ_beta", 0, ValueError),
        ("activation_situ_beta", None, ValueError),
        ("activation_situ_beta", float("nan"), ValueError),
        ("activation_situ_linear_beta", -25.0, ValueError),
        ("hidden_size", "7168", ValueError),
        ("hidden_size", True, ValueError),
        ("hidden_size", ..., ValueError),
        ("intermediate_size", 0, ValueError),
        ("moe_layer_freq", 0, ValueError),
        ("num_experts_per_token", 897, ValueError),
        ("num_experts_per_token", None, ValueError),
        ("num_expert_group", 5, ValueError),
        ("topk_group", 2, ValueError),
        ("rms_norm_eps", -1e-5, ValueError),
        ("routed_scaling_factor", float("inf"), ValueError),
        ("latent_moe_use_norm", "yes", ValueError),
        ("quantization_config", "mxfp4", ValueError),
    ],
)
def test_a_wrong_field_is_named_with_its_value(
    released: dict[str, Any], field: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=field) as caught:
        K3Config.from_dict(edited(released, **{field: value}))
    assert value is ... or str(value) in str(caught.value)


def test_a_field_that_a_model_with_experts_lacks_is_said_to_be_missing(released: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="moe_intermediate_size=None, or missing; a model with num_experts=896"):
        K3Config.from_dict(edited(released, moe_intermediate_size=...))


def test_too_few_experts_in_the_kept_groups(released: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="topk_group=1"):
        K3Config.from_dict(edited(released, num_expert_group=64, topk_group=1))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("quant_method",), "gptq"),
        (("format",), "nvfp4-pack-quantized"),
        (("config_groups", "group_0", "weights", "group_size"), 16),
        (("config_groups", "group_0", "weights", "num_bits"), 8),
        (("config_groups", "group_0", "weights", "type"), "int"),
        (("config_groups", "group_0", "input_activations"), {"num_bits": 8}),
    ],
)
def test_another_quantisation_is_refused(released: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    config = copy.deepcopy(released)
    target = config["text_config"]["quantization_config"]
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(NotImplementedError, match=path[-1]):
        K3Config.from_dict(config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b'{"text_config": 3}', "text_config must be an object"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": 1, "a": 2}', "'a' appears twice"),
        (b" " * 17_000_000, "more than 16000000 bytes"),
        (b'{"hidden_act": "situ"}', "config.json: config:"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        K3Config.from_pretrained(tmp_path)
    assert "config.json" in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        K3Config.from_pretrained(tmp_path)


def test_a_latent_norm_without_a_latent(released: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match="latent_moe_use_norm=True"):
        K3Config.from_dict(edited(released, routed_expert_hidden_size=None))


def test_a_path_may_be_a_string() -> None:
    assert K3Config.from_pretrained(str(DATA / "k3-config.json")).num_experts == 896


def test_the_quantisation_of_nvidia_s_release(released: dict[str, Any]) -> None:
    weights = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    declared = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "config_groups": {"group_0": {"weights": weights, "input_activations": weights}},
    }
    assert K3Config.from_dict(edited(released, quantization_config=declared)).quantization == "nvfp4"
    with pytest.raises(NotImplementedError, match=r"quant_algo='FP8' is not implemented; 'NVFP4' is"):
        K3Config.from_dict(edited(released, quantization_config=declared | {"quant_algo": "FP8"}))
    weights["group_size"] = 32
    with pytest.raises(NotImplementedError, match="group_size=32"):
        K3Config.from_dict(edited(released, quantization_config=declared))
