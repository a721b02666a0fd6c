"""`save_layer` and `save_layers`: a checkpoint folder that appears only when it is complete and has been read back."""

import dataclasses
import functools
import json
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

from k3jax.checkpoint import CONFIG, INDEX, Checkpoint
from k3jax.checkpoint.safetensors_writer import NewTensor
from k3jax.checkpoint.synthetic import PREFIX
from k3jax.checkpoint.tensor_table import MOE, split_name
from k3jax.config import K3Config
from k3jax.mlp import GatedMLP
from k3jax.moe import MoE
from k3jax.saving.config_json import config_json, differing_fields
from k3jax.saving.layer_tensors import is_packed, layer_tensors
from k3jax.saving.shards import ShardWriter
from k3jax.strict_json import shown

MAX_SHARD_BYTES = 5_000_000_000


def save_layer(
    layer: GatedMLP | MoE,
    folder: str | Path,
    *,
    index: int,
    source: str | Path | K3Config,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Writes one layer as the checkpoint folder `folder`; the arguments and errors of `save_layers`.

    `index` is the layer's number, from 0. The folder holds no other layer: `load_layer(folder, index)` and
    `k3jax compare --layers index` read it.
    """
    return save_layers([(index, layer)], folder, source=source, max_shard_bytes=max_shard_bytes)


def save_layers(
    layers: Iterable[tuple[int, GatedMLP | MoE]],
    folder: str | Path,
    *,
    source: str | Path | K3Config,
    rest: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Writes layers to the new checkpoint folder `folder` in the Hugging Face layout: config, index and shards.

    Experts in MXFP4 are written byte for byte as they were read, the router's bias in float32, all else in bfloat16.
    The folder is written under another name, read back strictly, and renamed.

    Args:
        layers: numbers from 0 and layers. May be a generator: each is written before the next is asked for.
        source: the checkpoint folder that the layers come from, whose `config.json` is kept but for the number of
            experts and whether they are packed; or a K3Config.
        rest: also copy every other tensor of `source`, so that the folder holds the whole model's.
        max_shard_bytes: of tensors in one file.

    Raises:
        FileExistsError: `folder` exists.
        ValueError: there are no layers, they differ in their number of experts or are not what `source` describes, one
            has adapters, or a tensor is larger than a shard may be.
    """
    folder = Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} exists; choose a new folder, or remove it")
    if rest and isinstance(source, K3Config):
        raise ValueError("rest=True copies what a checkpoint holds beside these layers: pass its folder as source")
    origin = source if isinstance(source, K3Config) else Checkpoint.open(source)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.unfinished")
    unfinished.mkdir()
    try:
        saving = _Saving(origin, ShardWriter(unfinished, max_shard_bytes))
        for index, layer in layers:
            saving.add(index, layer)
        if rest:
            saving.add_rest()
        saving.finish(unfinished)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return folder


class _Saving:
    """What has been given to the shards so far, and what the config must say of it."""

    def __init__(self, source: Checkpoint | K3Config, shards: ShardWriter) -> None:
        self._source = source
        self._config = source if isinstance(source, K3Config) else source.config
        self._shards = shards
        self._layers: set[int] = set()
        self._num_experts: int | None = None
        self._packed: bool | None = None

    def add(self, index: int, layer: GatedMLP | MoE) -> None:
        config = layer.config if isinstance(layer, MoE) else self._config
        self._check(index, layer)
        for suffix, spec, read in layer_tensors(layer, config, index):
            self._shards.add(NewTensor(f"{self._prefix}{index}.{suffix}", spec.dtypes[0], spec.shape), read)
        self._shards.flush()  # A layer given later need not be in memory together with this one.
        self._layers.add(index)

    def add_rest(self) -> None:
        """Every other tensor of the source."""
        assert isinstance(self._source, Checkpoint)
        same_experts = self._num_experts in (None, self._config.num_experts)
        for name, file_name in self._source.names.items():
            located = split_name(name)
            if located is not None and located[1].startswith(("mlp.", MOE)):
                if located[0] in self._layers:
                    continue
                if located[1].startswith(MOE) and not same_experts:
                    raise ValueError(
                        f"{self._source.path}: layer {located[0]} still has {self._config.num_experts} experts, the "
                        f"layers to save {self._num_experts}; a model has one number: save all of its MoE layers"
                    )
            shard = self._source.shard(file_name)
            entry = shard.entries.get(name)
            if entry is None:
                raise ValueError(f"{shard.path} lacks tensor {shown(name)}, which the index places there")
            self._shards.add(NewTensor(name, entry.dtype, entry.shape), functools.partial(shard.__getitem__, name))

    def finish(self, folder: Path) -> None:
        """Writes the index and the config, and reads back what the layers' tensors are."""
        if not self._layers:
            raise ValueError("there is no layer to save")
        _write_json(folder / INDEX, self._shards.finish())
        source = self._source
        raw = source if isinstance(source, K3Config) else json.loads((source.path / CONFIG).read_bytes())
        _write_json(folder / CONFIG, config_json(raw, num_experts=self._num_experts, packed=self._packed))
        saved = Checkpoint.open(folder)
        for index in sorted(self._layers):
            saved.read_layer(index)

    @property
    def _prefix(self) -> str:
        if isinstance(self._source, K3Config) or any(name.startswith(PREFIX) for name in self._source.names):
            return PREFIX
        return PREFIX.removeprefix("language_model.")

    def _check(self, index: int, layer: GatedMLP | MoE) -> None:
        """Raises ValueError unless `layer` can be layer `index` of the model that `source` describes."""
        if index in self._layers:
            raise ValueError(f"layer {index} is to be saved twice")
        if self._config.is_moe(index) != isinstance(layer, MoE):
            raise ValueError(f"layer {index} of source is no {type(layer).__name__}")
        if isinstance(layer, GatedMLP):
            expected = (self._config.hidden_size, self._config.intermediate_size)
            if layer.down.shape != expected or layer.activation != self._config.activation:
                raise ValueError(
                    f"layer {index}: down {layer.down.shape} with {layer.activation} is not source's {expected} with "
                    f"{self._config.activation}"
                )
            return
        if layer.adapters is not None:
            raise ValueError(f"layer {index} has adapters: merge_adapters first, or save_adapters and load it anew")
        first = self._num_experts is None
        if first:
            self._num_experts, self._packed = layer.config.num_experts, is_packed(layer)
        expected_config = dataclasses.replace(self._config, num_experts=self._num_experts)
        differing = differing_fields(layer.config, expected_config)
        if differing:
            raise ValueError(f"layer {index} is not of the model that source describes: {'; '.join(differing)}")
        if is_packed(layer) != self._packed:
            raise ValueError(f"layer {index} has plain experts and another packed ones, or the other way round")


def _write_json(path: Path, value: object) -> None:
    path.write_bytes(json.dumps(value, indent=2).encode() + b"\n")
