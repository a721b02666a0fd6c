"""`K3Config`: what a layer needs to know of a Kimi K3 `config.json`, read strictly.

Nested (`text_config`) and flat configs are accepted, and the aliases that derived checkpoints use. A field that changes
the layer's mathematics in a way this library does not implement raises with its name and value; fields of other parts
of the model (attention, vision, tokenizer) are not looked at.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from k3jax.strict_json import read_json_object, shown
from pallas_kernels import Activation, Situ, SwiGLU

_ALIASES = {
    "num_expert_group": "n_group",
    "moe_router_activation_func": "scoring_func",
    "moe_renormalize": "norm_topk_prob",
    "num_experts_per_token": "num_experts_per_tok",
    "routed_expert_hidden_size": "moe_latent_size",
}
# Switches that must be off or absent: with them the checkpoint holds a layer that this library does not compute.
_UNSUPPORTED_SWITCHES = ("mlp_bias", "moe_bias", "moe_gated_shared_experts")
_MAX_BYTES = 16_000_000  # Published configs have a few thousand.
_MISSING: object = object()


@dataclasses.dataclass(frozen=True, kw_only=True)
class K3Config:
    """The MLP and mixture-of-experts part of a Kimi K3 text config. Hashable; sizes in elements.

    Attributes:
        hidden_size: D. intermediate_size: width of a dense layer's MLP. moe_intermediate_size: F, width of an expert.
        routed_expert_hidden_size: L, what routed experts read and write; None when they work on D itself.
        num_experts: E, None for a model without experts. num_experts_per_token: X.
        num_shared_experts: they form one MLP of width `shared_intermediate_size`.
        activation: `Situ` or `SwiGLU`, for dense, shared and routed experts alike.
        quantization: "mxfp4" or "nvfp4", as the config declares the experts, or None. Loading goes by what is there.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    activation: Activation
    rms_norm_eps: float = 1e-6
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    num_experts: int | None = None
    num_experts_per_token: int | None = None
    moe_intermediate_size: int | None = None
    num_shared_experts: int = 0
    routed_expert_hidden_size: int | None = None
    latent_moe_use_norm: bool = False
    router_activation: str = "sigmoid"
    renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_expert_group: int = 1
    topk_group: int = 1
    quantization: str | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "moe_layer_freq"):
            _require_int(name, getattr(self, name), minimum=1)
        for name in ("first_k_dense_replace", "num_shared_experts"):
            _require_int(name, getattr(self, name), minimum=0)
        for name in ("rms_norm_eps", "routed_scaling_factor"):
            _require_number(name, getattr(self, name))
        for name in ("latent_moe_use_norm", "renormalize"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"config: {name}={shown(getattr(self, name))} must be true or false")
        if self.router_activation not in ("sigmoid", "softmax"):
            raise NotImplementedError(
                f"config: moe_router_activation_func={shown(self.router_activation)} is not implemented; sigmoid and "
                "softmax are"
            )
        if self.num_experts is not None:
            self._check_experts(self.num_experts)

    def _check_experts(self, num_experts: int) -> None:
        for name in ("num_experts", "num_experts_per_token", "moe_intermediate_size", "num_expert_group", "topk_group"):
            if getattr(self, name) is None:
                raise ValueError(f"config: {name}=None, or missing; a model with {num_experts=} needs it")
            _require_int(name, getattr(self, name), minimum=1)
        if self.routed_expert_hidden_size is not None:
            _require_int("routed_expert_hidden_size", self.routed_expert_hidden_size, minimum=1)
        elif self.latent_moe_use_norm:
            raise NotImplementedError(
                "config: latent_moe_use_norm=True without routed_expert_hidden_size: there is no latent to normalise"
            )
        if self.experts_per_token > num_experts:
            raise ValueError(f"config: num_experts_per_token={self.experts_per_token} exceeds {num_experts=}")
        groups, kept = self.num_expert_group, self.topk_group
        if num_experts % groups or kept > groups:
            raise ValueError(
                f"config: num_expert_group={groups} must divide {num_experts=}, and topk_group={kept} not exceed it"
            )
        if groups > kept:
            per_group = num_experts // groups
            if per_group < 2 or kept * per_group < self.experts_per_token:
                raise ValueError(
                    f"config: {groups} groups of {per_group} experts with topk_group={kept} cannot offer two experts "
                    f"a group and num_experts_per_token={self.experts_per_token} in all"
                )

    @property
    def experts_per_token(self) -> int:
        """X; asserts that the model has experts."""
        assert self.num_experts_per_token is not None, "the config has no experts"
        return self.num_experts_per_token

    @property
    def expert_width(self) -> int:
        """F; asserts that the model has experts."""
        assert self.moe_intermediate_size is not None, "the config has no experts"
        return self.moe_intermediate_size

    @property
    def latent_size(self) -> int:
        """What routed experts read and write: L, or D where there is no latent."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the one MLP that all shared experts form; 0 without shared experts."""
        return self.num_shared_experts * (self.moe_intermediate_size or 0)

    def is_moe(self, layer: int) -> bool:
        """Whether 0-based `layer` is a mixture of experts; the others are dense.

        Raises:
            ValueError: the model has no such layer.
        """
        if not 0 <= layer < self.num_hidden_layers:
            raise ValueError(f"layer={layer} does not exist; the model has layers 0 to {self.num_hidden_layers - 1}")
        return self.num_experts is not None and layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "K3Config":
        """Reads a checkpoint folder's `config.json`, or that file itself.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not a JSON object, or a field is missing or wrong (the message names it).
            NotImplementedError: a field asks for something this library does not compute.
        """
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist; a checkpoint folder must hold the model's config.json")
        values = read_json_object(file, _MAX_BYTES)
        try:
            return cls.from_dict(values)
        except (ValueError, NotImplementedError) as error:
            raise type(error)(f"{file}: {error}") from None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "K3Config":
        """The same from an already parsed `config.json`; raises ValueError and NotImplementedError alike."""
        text = values.get("text_config", values)
        if not isinstance(text, Mapping):
            raise ValueError(f"config: text_config must be an object, not {shown(text)}")
        fields = _Fields(text)
        _refuse_unsupported(text)
        quantization = text.get("quantization_config", values.get("quantization_config"))
        return cls(
            hidden_size=fields.get("hidden_size"),
            intermediate_size=fields.get("intermediate_size"),
            num_hidden_layers=fields.get("num_hidden_layers"),
            activation=_activation(text),
            rms_norm_eps=fields.get("rms_norm_eps", 1e-6),
            first_k_dense_replace=fields.get("first_k_dense_replace", 0),
            moe_layer_freq=fields.get("moe_layer_freq", 1),
            num_experts=fields.get("num_experts", None),
            num_experts_per_token=fields.get("num_experts_per_token", None),
            moe_intermediate_size=fields.get("moe_intermediate_size", None),
            num_shared_experts=fields.get("num_shared_experts", None) or 0,
            routed_expert_hidden_size=fields.get("routed_expert_hidden_size", None),
            latent_moe_use_norm=fields.get("latent_moe_use_norm", False),
            router_activation=fields.get("moe_router_activation_func", "sigmoid"),
            renormalize=fields.get("moe_renormalize", True),
            routed_scaling_factor=fields.get("routed_scaling_factor", 1.0),
            num_expert_group=fields.get("num_expert_group", 1),
            topk_group=fields.get("topk_group", 1),
            quantization=_quantization(quantization),
        )


class _Fields:
    """Looks a field up under its official name and its alias; both present and different is an error."""

    def __init__(self, text: Mapping[str, Any]) -> None:
        self._text = text

    def get(self, name: str, default: object = _MISSING) -> Any:
        alias = _ALIASES.get(name)
        given = [(key, self._text[key]) for key in (name, alias) if key is not None and key in self._text]
        if len(given) == 2 and given[0][1] != given[1][1]:
            raise ValueError(
                f"config: {given[0][0]}={shown(given[0][1])} and its alias {given[1][0]}={shown(given[1][1])} disagree"
            )
        if given:
            return given[0][1]
        if default is _MISSING:
            raise ValueError(f"config: {name} is missing")
        return default


def _activation(text: Mapping[str, Any]) -> Activation:
    # The official class falls back to SwiGLU, and to betas of 1, when keys are missing; both would be silently wrong.
    if "hidden_act" not in text:
        raise ValueError('config: hidden_act is missing; Kimi K3 says "situ" (write "silu" if SwiGLU is meant)')
    name = text["hidden_act"]
    if name == "silu":
        return SwiGLU()
    if name != "situ":
        raise NotImplementedError(f"config: hidden_act={shown(name)} is not implemented; situ and silu are")
    for key in ("activation_situ_beta", "activation_situ_linear_beta"):
        if key not in text:
            raise ValueError(f'config: {key} is missing although hidden_act is "situ"; Kimi K3 has betas 4.0 and 25.0')
    try:
        return Situ(text["activation_situ_beta"], text["activation_situ_linear_beta"])
    except ValueError as error:
        raise ValueError(f"config: activation_situ_beta, activation_situ_linear_beta: {error}") from None


def _refuse_unsupported(text: Mapping[str, Any]) -> None:
    method = text.get("topk_method", "noaux_tc")
    if method != "noaux_tc":
        raise NotImplementedError(f"config: topk_method={shown(method)} is not implemented; noaux_tc is")
    for switch in _UNSUPPORTED_SWITCHES:
        if text.get(switch):
            raise NotImplementedError(f"config: {switch}={shown(text[switch])} is not implemented; only false is")


def _quantization(quantization: object) -> str | None:
    """The release's packing, "mxfp4", or that of NVIDIA's tool, "nvfp4"; None without one; anything else raises."""
    if quantization is None:
        return None
    if not isinstance(quantization, Mapping):
        raise ValueError(f"config: quantization_config must be an object or null, not {shown(quantization)}")
    if quantization.get("quant_method") == "modelopt":
        _require_quantization("quant_algo", quantization.get("quant_algo"), "NVFP4")
        _check_groups(quantization, (("group_size", 16), ("num_bits", 4), ("type", "float")))
        return "nvfp4"
    _require_quantization("quant_method", quantization.get("quant_method"), "compressed-tensors")
    _require_quantization("format", quantization.get("format"), "mxfp4-pack-quantized")
    weights = (("group_size", 32), ("num_bits", 4), ("type", "float"), ("symmetric", True))
    for where, group in _check_groups(quantization, weights):
        _require_quantization(f"{where}.input_activations", group.get("input_activations"), None)
    return "mxfp4"


def _check_groups(
    quantization: Mapping[str, Any], weights: Sequence[tuple[str, object]]
) -> list[tuple[str, Mapping[str, Any]]]:
    """`(where, group)` of each config group, whose `weights` must agree with `weights` where it says anything."""
    groups = quantization.get("config_groups", {})
    if not isinstance(groups, Mapping):
        raise ValueError(f"config: quantization_config.config_groups must be an object, not {shown(groups)}")
    found = []
    for name, group in groups.items():
        where = f"config_groups.{name}"
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise ValueError(f"config: quantization_config.{where} must be an object with a `weights` object")
        for field, expected in weights:
            _require_quantization(f"{where}.weights.{field}", group["weights"].get(field, expected), expected)
        found.append((where, group))
    return found


def _require_quantization(field: str, value: object, expected: object) -> None:
    if value != expected:
        raise NotImplementedError(
            f"config: quantization_config.{field}={shown(value)} is not implemented; {expected!r} is"
        )


def _require_int(name: str, value: object, *, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"config: {name}={shown(value)} must be an integer of at least {minimum}")


def _require_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"config: {name}={shown(value)} must be a positive finite number")
