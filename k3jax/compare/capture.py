"""Captures: what went through a layer in another engine, by stage, in a safetensors file; see docs/captures.md."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from k3jax.checkpoint.safetensors_file import SafetensorsFile
from k3jax.config import K3Config
from k3jax.strict_json import shown

FORMAT = "k3jax-capture-1"
RECIPES = ("bf16", "w4a16", "w4a8", "w4a8_fp8")
ROUNDING_ORDERS = ("official", "engine")
STAGES: dict[str, tuple[str, str]] = {
    "input": ("T", "D"),
    "router_logits": ("T", "E"),
    "expert_ids": ("T", "X"),
    "expert_weights": ("T", "X"),
    "latent": ("T", "L"),
    "expert_sum": ("T", "L"),
    "normed_latent": ("T", "L"),
    "shared": ("T", "D"),
    "output": ("T", "D"),
}
"""Every stage, in the order of the computation, with its shape. A layer without a latent has L = D."""

_FLOATS = ("bfloat16", "float16", "float32", "float64")
_IDS = ("int32", "int64")
_LETTERS = {"T": "tokens", "D": "hidden size", "E": "experts", "X": "experts per token", "L": "latent size"}
_NAME = re.compile(r"layers\.(0|[1-9][0-9]{0,5})\.([a-z_]+)")

Stages = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Capture:
    """A checked capture.

    recipe          how the engine computed: "bf16", "w4a16", "w4a8" or "w4a8_fp8"
    rounding_order  "official": every stage is rounded where the official model rounds it; "engine": somewhere else
    engine          whose numbers these are, free text
    layers          {layer: {stage: array}}, read-only views of the file; `expert_ids` int32, the rest as stored. Every
                    layer has `input` and at least one other stage
    """

    path: Path
    recipe: str
    engine: str
    rounding_order: Literal["official", "engine"]
    layers: dict[int, Stages]

    @classmethod
    def open(cls, path: str | Path) -> "Capture":
        """Read and check a capture.

        FileNotFoundError where there is no such file; ValueError, naming the tensor or the metadata key, where it is no
        safetensors file or no well-formed capture. NaN and infinities are values like others: engines produce them.
        """
        file = SafetensorsFile(path)
        metadata = _checked_metadata(file)
        layers: dict[int, Stages] = {}
        for name in file:
            layer, stage = _parse_name(file, name)
            layers.setdefault(layer, {})[stage] = _checked_stage(file, name, stage)
        if not layers:
            raise ValueError(
                f"{file.path} holds no tensors; a capture holds layers.N.input and what the layer made of it"
            )
        layers = {layer: _in_order(layers[layer]) for layer in sorted(layers)}
        for layer, stages in layers.items():
            _check_layer(f"{file.path}: layer {layer}", stages)
        order: Literal["official", "engine"] = "official" if metadata["rounding_order"] == "official" else "engine"
        return cls(file.path, metadata["recipe"], metadata["engine"], order, layers)

    def check_against(self, config: K3Config) -> None:
        """ValueError where a layer, a stage or a size of the capture isn't that of a model with this config."""
        sizes = {"D": config.hidden_size, "L": config.latent_size}
        sizes |= {"E": config.num_experts or 0, "X": config.num_experts_per_token or 0}
        for layer, stages in self.layers.items():
            what = f"{self.path}: layer {layer}"
            if layer >= config.num_hidden_layers:
                raise ValueError(f"{what} does not exist; the model has layers 0 to {config.num_hidden_layers - 1}")
            unexpected = stages.keys() - _stages_of_model(config, layer)
            if unexpected:
                raise ValueError(f"{what} has no {' or '.join(sorted(unexpected))} in the model; its config says so")
            for stage, array in stages.items():
                letter = STAGES[stage][1]
                if array.shape[1] != sizes[letter]:
                    raise ValueError(
                        f"{what}, stage {stage} has the shape {array.shape}; the model's {_LETTERS[letter]} is "
                        f"{sizes[letter]}: is the capture of another model?"
                    )
            if "expert_ids" in stages and stages["expert_ids"].max() >= sizes["E"]:
                raise ValueError(
                    f"{what}, stage expert_ids reaches {stages['expert_ids'].max()} of {sizes['E']} experts"
                )


def _stages_of_model(config: K3Config, layer: int) -> set[str]:
    if not config.is_moe(layer):
        return {"input", "output"}
    has_latent = config.routed_expert_hidden_size is not None
    has_part = {
        "latent": has_latent,
        "normed_latent": has_latent and config.latent_moe_use_norm,
        "shared": config.num_shared_experts > 0,
    }
    return {stage for stage in STAGES if has_part.get(stage, True)}


def _checked_metadata(file: SafetensorsFile) -> dict[str, str]:
    """The metadata, with every key that a capture must have and a known value in each."""
    allowed: dict[str, tuple[str, ...] | None] = {
        "format": (FORMAT,),
        "engine": None,
        "recipe": RECIPES,
        "rounding_order": ROUNDING_ORDERS,
    }
    for key, values in allowed.items():
        hint = "" if values is None else f"; it must be {' or '.join(map(repr, values))}"
        if key not in file.metadata:
            raise ValueError(f"{file.path}: the metadata lack {key!r}{hint}; docs/captures.md describes the format")
        if values is not None and file.metadata[key] not in values:
            raise ValueError(f"{file.path}: metadata {key!r} is {shown(file.metadata[key])}{hint}")
    return file.metadata


def _parse_name(file: SafetensorsFile, name: str) -> tuple[int, str]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{file.path}: tensor {shown(name)} must be called layers.N.STAGE, such as layers.1.input")
    if match[2] not in STAGES:
        raise ValueError(f"{file.path}: tensor {shown(name)} is no known stage; the stages are {', '.join(STAGES)}")
    return int(match[1]), match[2]


def _checked_stage(file: SafetensorsFile, name: str, stage: str) -> NDArray[Any]:
    array = file[name]
    what = f"{file.path}: tensor {shown(name)}"
    expected = _IDS if stage == "expert_ids" else _FLOATS
    if array.dtype.name not in expected:
        raise ValueError(f"{what} must be {' or '.join(expected)}: got {array.dtype.name}")
    if array.ndim != 2:
        shape = ", ".join(STAGES[stage])
        raise ValueError(f"{what} must have the shape [{shape}], tokens flattened: got {array.shape}")
    if stage != "expert_ids":
        return array
    if array.size and not -1 <= array.min() <= array.max() < 2**31:
        raise ValueError(f"{what} must hold expert numbers, or -1 for none: got {array.min()} ... {array.max()}")
    return array.astype(np.int32, copy=False)


def _check_layer(what: str, stages: Stages) -> None:
    """That a layer has its input and something to compare, and that shapes agree with each other."""
    if "input" not in stages:
        raise ValueError(f"{what} lacks the stage input, without which nothing can be computed again")
    if len(stages) == 1:
        raise ValueError(f"{what} has the stage input only; capture at least one other, such as output")
    sizes: dict[str, tuple[int, str]] = {}
    for stage, array in stages.items():
        for letter, size in zip(STAGES[stage], array.shape, strict=True):
            known, by = sizes.setdefault(letter, (size, stage))
            if size != known:
                raise ValueError(
                    f"{what}: stage {stage} has the shape {array.shape}, but by the stage {by} {letter} "
                    f"({_LETTERS[letter]}) is {known}; the shape must be [{', '.join(STAGES[stage])}]"
                )
    for stage, array in stages.items():
        if array.size == 0:
            raise ValueError(f"{what}: stage {stage} is empty, {array.shape}; a comparison needs at least one token")
    ids = stages.get("expert_ids")
    if ids is not None and "E" in sizes and ids.max() >= sizes["E"][0]:
        raise ValueError(f"{what}: stage expert_ids reaches {ids.max()}, but router_logits has {sizes['E'][0]} experts")


def _in_order(stages: Stages) -> Stages:
    return {stage: stages[stage] for stage in STAGES if stage in stages}
