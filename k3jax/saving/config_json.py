"""The `config.json` of a saved layer: its source's own with the new sizes, or one made from a `K3Config`."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from k3jax.checkpoint.synthetic import synthetic_config
from k3jax.config import K3Config
from pallas_kernels import Situ


def config_json(
    source: Mapping[str, Any] | K3Config, *, num_experts: int | None, packed: bool | None
) -> dict[str, Any]:
    """`source` with `num_experts`, and with the release's `quantization_config` exactly if experts are `packed`.

    None leaves either as it is. Whatever else a source's dictionary says is kept, attention's fields too.
    """
    made = _from_fields(source) if isinstance(source, K3Config) else copy.deepcopy(dict(source))
    text = made.get("text_config", made)
    if num_experts is not None:
        text["num_experts"] = num_experts
    if packed is False:
        made.pop("quantization_config", None)
        text.pop("quantization_config", None)
    elif packed and K3Config.from_dict(made).quantization != "mxfp4":
        text["quantization_config"] = synthetic_config()["text_config"]["quantization_config"]
    return made


def differing_fields(layer: K3Config, saved: K3Config) -> list[str]:
    """`field: layer's value, saved value` of each field that matters to a layer and is not the same."""
    found = []
    for field in dataclasses.fields(K3Config):
        ours, theirs = getattr(layer, field.name), getattr(saved, field.name)
        if ours != theirs and not field.name.startswith("quantiz"):
            found.append(f"{field.name}={ours!r}, not {theirs!r}")
    return found


def _from_fields(config: K3Config) -> dict[str, Any]:
    made = synthetic_config()
    text = made["text_config"]
    names = {"router_activation": "moe_router_activation_func", "renormalize": "moe_renormalize"}
    for field in dataclasses.fields(config):
        if field.name != "activation" and not field.name.startswith("quantiz"):
            text[names.get(field.name, field.name)] = getattr(config, field.name)
    activation = config.activation
    text["hidden_act"] = "situ" if isinstance(activation, Situ) else "silu"
    for beta in ("beta", "linear_beta"):
        text.pop(f"activation_situ_{beta}")
        if isinstance(activation, Situ):
            text[f"activation_situ_{beta}"] = getattr(activation, beta)
    return made
