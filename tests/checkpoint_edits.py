"""Small checkpoints for tests, and ways to spoil them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from k3jax.checkpoint import CONFIG, INDEX
from k3jax.checkpoint.safetensors_file import DTYPES, SafetensorsFile
from k3jax.checkpoint.safetensors_writer import write_safetensors
from k3jax.checkpoint.synthetic import synthetic_config, write_checkpoint

PREFIX = "language_model.model.layers.1.block_sparse_moe."
Stored = dict[str, tuple[str, np.ndarray]]


def tiny_config(**sizes: int) -> dict[str, Any]:
    """Layer 0 dense, layer 1 of 4 experts; every width different, so that no transposed shape can pass."""
    defaults = {
        "hidden_size": 96,
        "intermediate_size": 160,
        "latent_size": 128,
        "expert_width": 32,
        "num_experts": 4,
        "top_k": 2,
        "layers": 2,
    }
    return synthetic_config(**(defaults | sizes))


def tiny_checkpoint(folder: Path, *, plain_experts: str | None = None, **sizes: int) -> Path:
    """A `tiny_config` checkpoint at `folder / "tiny"`."""
    return write_checkpoint(folder / "tiny", tiny_config(**sizes), plain_experts=plain_experts)


def read_all(folder: Path) -> Stored:
    """Every tensor of every shard: name -> (dtype, array in memory)."""
    tensors: Stored = {}
    for path in sorted(folder.glob("*.safetensors")):
        file = SafetensorsFile(path)
        tensors |= {name: (file.entries[name].dtype, np.array(file[name])) for name in file}
    return tensors


def rewrite(folder: Path, edit: Callable[[Stored], None]) -> None:
    """Replaces the shards by a single `model.safetensors` of the edited tensors, without an index."""
    tensors = read_all(folder)
    edit(tensors)
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink(missing_ok=True)
    ordered = dict(sorted(tensors.items(), key=lambda item: -DTYPES[item[1][0]].itemsize))
    write_safetensors(folder / "model.safetensors", ordered)


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Changes a JSON file in place."""
    value = json.loads(path.read_bytes())
    edit(value)
    path.write_text(json.dumps(value))


def edit_index(folder: Path, edit: Callable[[dict[str, str]], object]) -> None:
    """Changes the index's weight_map in place."""
    edit_json(folder / INDEX, lambda index: edit(index["weight_map"]))


def edit_config(folder: Path, values: Mapping[str, Any]) -> None:
    """Changes fields of the text config in place."""
    edit_json(folder / CONFIG, lambda config: config["text_config"].update(values))
