"""Synthetic checkpoints in the release's exact layout, the same to the byte everywhere.

Weights are scaled so that unit-normal input gives every stage values of order one: nothing hides in zeros, the router
chooses clearly, and SiTU works in its curved range.
"""

import json
import math
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from k3jax.checkpoint.cache import cached_folder
from k3jax.checkpoint.folder import CONFIG, INDEX
from k3jax.checkpoint.safetensors_writer import NewTensor, write_header, write_tensor
from k3jax.checkpoint.synthetic_values import CODES_RMS, distinct_biases, normal_values, packed_codes, scale_bytes
from k3jax.checkpoint.tensor_table import EXPERTS, layer_table
from k3jax.config import K3Config

DEFAULT_NAME = "synthetic-checkpoint-v1"  # Count up whenever what `default_checkpoint` writes changes.
PREFIX = "language_model.model.layers."
Progress = Callable[[int, int], None]

_ROUTER_STD = 1.25  # of the logits
_GATE_STD = 1.5  # of gate and up
_ACTIVATION_RMS = 1.0  # about what SiTU makes of gate and up of that size
_BIAS_STD = 0.01


def synthetic_config(
    *,
    hidden_size: int = 512,
    intermediate_size: int = 1024,
    latent_size: int = 256,
    expert_width: int = 192,
    num_experts: int = 32,
    top_k: int = 4,
    shared_experts: int = 2,
    layers: int = 4,
    dense_layers: int = 1,
) -> dict[str, Any]:
    """A `config.json` nested as the release's, with the release's values for all but the sizes."""
    text: dict[str, Any] = {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "dtype": "bfloat16",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-05,
        "first_k_dense_replace": dense_layers,
        "moe_layer_freq": 1,
        "num_experts": num_experts,
        "num_experts_per_token": top_k,
        "num_shared_experts": shared_experts,
        "moe_intermediate_size": expert_width,
        "routed_expert_hidden_size": latent_size,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "quantization_config": _quantization_config(),
    }
    return {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text}


def _quantization_config() -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
        ],
    }


def write_checkpoint(
    folder: str | Path,
    config_dict: Mapping[str, Any],
    *,
    seed: int = 0,
    plain_experts: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Writes a checkpoint of random weights to the new `folder`, which appears only when it is complete.

    Args:
        config_dict: written as `config.json`; its sizes decide the tensors.
        plain_experts: None packs routed experts in MXFP4; "BF16", "F16" or "F32" stores `experts.E.w1.weight`.
        progress: called with bytes written and bytes in all, after each tensor.

    Raises:
        FileExistsError: `folder` exists.
        ValueError: the config is wrong, or `plain_experts` is none of the above.
    """
    folder = Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} exists; choose a new folder, or remove it")
    if plain_experts not in (None, "BF16", "F16", "F32"):
        raise ValueError(f"{plain_experts=} must be None, 'BF16', 'F16' or 'F32'")
    config = K3Config.from_dict(config_dict)
    shards = _shards(config, plain_experts)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.unfinished")
    unfinished.mkdir()
    try:
        _write_json(unfinished / CONFIG, config_dict)
        _write_json(unfinished / INDEX, _index(shards))
        _write_shards(unfinished, shards, _Values(config, seed), progress)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return folder


def default_checkpoint() -> Path:
    """The embedded checkpoint, 16 MB of one dense and three MoE layers: made once, in the user's cache.

    Raises:
        OSError: the cache cannot be written; `K3JAX_CACHE` names another folder.
    """
    return cached_folder(DEFAULT_NAME, lambda folder: write_checkpoint(folder, synthetic_config()))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_bytes(json.dumps(value, indent=2).encode() + b"\n")


def _index(shards: Mapping[str, list[NewTensor]]) -> dict[str, Any]:
    weight_map = {tensor.name: file_name for file_name, tensors in shards.items() for tensor in tensors}
    total = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _write_shards(
    folder: Path, shards: Mapping[str, list[NewTensor]], values: "_Values", progress: Progress | None
) -> None:
    total = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors)
    done = 0
    for file_name, tensors in shards.items():
        with (folder / file_name).open("xb") as file:
            write_header(file, tensors, {"format": "pt"})
            for tensor in tensors:
                write_tensor(file, tensor, values.of(tensor))
                done += tensor.nbytes
                if progress is not None:
                    progress(done, total)


def _shards(config: K3Config, plain_experts: str | None) -> dict[str, list[NewTensor]]:
    """File name -> its tensors in order: layer N in shard N + 1, but for its router's bias, which falls into the next.

    (In the release too a layer lies *mostly* in one shard; a reader that assumes more fails here.)
    """
    places: dict[int, list[NewTensor]] = {}
    for layer in range(config.num_hidden_layers):
        for tensor in _layer_tensors(config, layer, plain_experts):
            places.setdefault(layer + 1 + tensor.name.endswith("e_score_correction_bias"), []).append(tensor)
    width = {"F32": 0, "BF16": 1, "F16": 1, "U8": 2}  # Wider first, so that each tensor is aligned.
    return {
        f"model-{shard:05d}-of-{len(places):06d}.safetensors": sorted(tensors, key=lambda tensor: width[tensor.dtype])
        for shard, tensors in sorted(places.items())
    }


def _layer_tensors(config: K3Config, layer: int, plain_experts: str | None) -> Iterator[NewTensor]:
    """The layer's MLP, and the norm before it, which stands for all that a reader has to leave alone."""
    expert = f"{EXPERTS}0.w1.weight"
    stored = {f"{expert}_packed"} if plain_experts is None else {expert}
    specs = layer_table(config, layer, stored if config.is_moe(layer) else set()).specs
    yield NewTensor(f"{PREFIX}{layer}.post_attention_layernorm.weight", "BF16", (config.hidden_size,))
    for suffix, spec in specs.items():
        dtype = spec.dtypes[0]
        if plain_experts is not None and suffix.startswith(EXPERTS):
            dtype = plain_experts
        yield NewTensor(f"{PREFIX}{layer}.{suffix}", dtype, spec.shape)


class _Values:
    """The random values of each tensor, by its name's role."""

    def __init__(self, config: K3Config, seed: int) -> None:
        self._config = config
        self._seed = seed

    def of(self, tensor: NewTensor) -> Iterator[np.ndarray]:
        """The data of `tensor`, in chunks."""
        count = math.prod(tensor.shape)
        if tensor.name.endswith("norm.weight"):
            return normal_values(self._seed, tensor.name, count, std=0.1, mean=1.0, dtype=tensor.dtype)
        if tensor.name.endswith("e_score_correction_bias"):
            return iter([distinct_biases(self._seed, tensor.name, count, std=_BIAS_STD)])
        if tensor.name.endswith("weight_packed"):
            return packed_codes(self._seed, tensor.name, count)
        if tensor.name.endswith("weight_scale"):
            gain = self._std(tensor.name, tensor.shape[1] * 32) / CODES_RMS
            return scale_bytes(self._seed, tensor.name, count, gain=gain)
        std = self._std(tensor.name, tensor.shape[1])
        return normal_values(self._seed, tensor.name, count, std=std, dtype=tensor.dtype)

    def _std(self, name: str, inputs: int) -> float:
        """The standard deviation of a weight that sums over `inputs` values of order one."""
        unit = 1.0 / math.sqrt(inputs)
        role = name.split(".")[-2]
        if role == "gate":
            return _ROUTER_STD * unit
        if role in ("gate_proj", "up_proj", "w1", "w3"):
            return _GATE_STD * unit
        if role == "down_proj":
            return unit / _ACTIVATION_RMS
        if role == "w2":  # X experts, each weighed about 1 / X, sum to 1 / sqrt(X) of one's size.
            return unit / _ACTIVATION_RMS * math.sqrt(self._config.experts_per_token)
        assert role in ("routed_expert_down_proj", "routed_expert_up_proj"), name
        return unit
