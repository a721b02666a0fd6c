"""A Hugging Face checkpoint folder, opened without trusting it.

`Checkpoint.open(path)` reads `config.json` and the index; `read_layer(layer)` then locates one layer's tensors after
holding them to the table of `tensor_table.py`: every expected tensor is there once, with the right dtype and shape, and
nothing else is. Only the shards of the layer asked for are opened, so a partly downloaded checkpoint serves the layers
it has.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath

from k3jax.checkpoint.layer_tensors import LayerTensors, Place
from k3jax.checkpoint.safetensors_file import SafetensorsFile
from k3jax.checkpoint.tensor_table import (
    EXPERTS,
    PLAIN_DTYPES,
    ROUTER,
    LayerTable,
    TensorSpec,
    layer_table,
    out_of_scope_class,
    require_countable,
    split_name,
)
from k3jax.config import K3Config
from k3jax.strict_json import read_json_object, shown

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_INDEX_BYTES = 200_000_000  # The release's index, with 497,220 names, takes about 60 MB.


@dataclass
class Checkpoint:
    """An opened checkpoint folder.

    Attributes:
        path: the folder.
        config: the model's `K3Config`.
        names: tensor name -> file name of its shard, for the whole model, as the index says.
    """

    path: Path
    config: K3Config
    names: Mapping[str, str]
    _shards: dict[str, SafetensorsFile] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        """Opens the folder `path`.

        Raises:
            FileNotFoundError: no such folder, or it lacks the config or the tensors.
            ValueError, NotImplementedError: the config or the index is malformed or asks for what is not implemented.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{folder} is not a folder; give a checkpoint folder with {CONFIG} and {SINGLE} or its shards"
            )
        config = K3Config.from_pretrained(_inside(folder, CONFIG))
        require_countable(config)
        has_index, has_single = (folder / INDEX).exists(), (folder / SINGLE).exists()
        if has_index and has_single:
            raise ValueError(f"{folder} holds both {INDEX} and {SINGLE}; remove the one that is not meant")
        if has_index:
            return cls(folder, config, _read_index(_inside(folder, INDEX), folder))
        if not has_single:
            raise FileNotFoundError(f"{folder} holds neither {INDEX} nor {SINGLE}; is the download complete?")
        file = SafetensorsFile(_inside(folder, SINGLE))
        return cls(folder, config, dict.fromkeys(file, SINGLE), {SINGLE: file})

    def layer_names(self, layer: int) -> dict[str, str]:
        """Suffix -> full name of every tensor under `layer`, attention's too.

        Raises:
            ValueError: a suffix is there under both prefixes.
        """
        starts = (f"language_model.model.layers.{layer}.", f"model.layers.{layer}.")
        result: dict[str, str] = {}
        for name in self.names:
            if name.startswith(starts) and (located := split_name(name)):
                suffix = located[1]
                if suffix in result:
                    raise ValueError(
                        f"{self.path}: tensor {shown(suffix)} is there twice: {shown(result[suffix])}, {shown(name)}"
                    )
                result[suffix] = name
        return result

    def read_layer(self, layer: int) -> LayerTensors:
        """The tensors of `layer`'s MLP by suffix, checked; each is read when it is looked up.

        Raises:
            FileNotFoundError: a shard is missing.
            NotImplementedError: the router is packed.
            ValueError: anything else that the table does not allow; the message names the tensor.
        """
        self.config.is_moe(layer)  # A layer out of range is the caller's mistake, not the checkpoint's.
        present = {
            suffix: name for suffix, name in self.layer_names(layer).items() if out_of_scope_class(suffix) is None
        }
        table = layer_table(self.config, layer, present)
        self._check_names(table, layer, present)
        places = {suffix: self._place(present[suffix], spec) for suffix, spec in table.specs.items()}
        self._check_strays(layer, {self.names[name] for name in present.values()})
        return LayerTensors(places, table.stored)

    def _check_names(self, table: LayerTable, layer: int, present: Mapping[str, str]) -> None:
        where = f"{self.path}: layer {layer}"
        for suffix in table.stored_twice:
            raise ValueError(f"{where}: {shown(present[suffix])} is stored packed as well; one of the two must go")
        if table.stored.get(ROUTER, "plain") != "plain":
            raise NotImplementedError(f"{where}: {ROUTER} is packed; a router is read as {' or '.join(PLAIN_DTYPES)}")
        missing = [suffix for suffix in table.specs if suffix not in present]
        unknown = [name for suffix, name in present.items() if suffix not in table.specs]
        if missing or unknown:
            raise ValueError(f"{where} does not match its config: " + "; ".join(_mismatches(missing, unknown)))
        ways = {stored: stem for stem, stored in table.stored.items() if stem.startswith(EXPERTS)}
        if len(ways) > 1:
            kinds = ", ".join(f"{stem} {stored}" for stored, stem in sorted(ways.items(), reverse=True))
            raise ValueError(f"{where}: experts are stored in more than one way: {kinds}")

    def shard(self, file_name: str) -> SafetensorsFile:
        """The opened file of this name, which must lie within the folder."""
        if file_name not in self._shards:
            self._shards[file_name] = SafetensorsFile(_inside(self.path, file_name))
        return self._shards[file_name]

    def _place(self, name: str, spec: TensorSpec) -> Place:
        shard = self.shard(self.names[name])
        entry = shard.entries.get(name)
        if entry is None:
            raise ValueError(f"{shard.path} lacks tensor {shown(name)}, which the index places there")
        if entry.dtype not in spec.dtypes:
            raise ValueError(
                f"{shard.path}: tensor {shown(name)} has dtype {entry.dtype}, expected {' or '.join(spec.dtypes)}"
            )
        if not spec.allows(entry.shape):
            raise ValueError(
                f"{shard.path}: tensor {shown(name)} has shape {entry.shape}, the config's sizes make it {spec.shape}"
            )
        return Place(shard, name)

    def _check_strays(self, layer: int, shard_names: Iterable[str]) -> None:
        """A shard's own tensors of this layer's MLP must be the ones that the index places there."""
        starts = tuple(
            f"{prefix}model.layers.{layer}.{part}."
            for prefix in ("language_model.", "")
            for part in ("mlp", "block_sparse_moe")
        )
        for shard_name in sorted(shard_names):
            for name in self.shard(shard_name).entries:
                if name.startswith(starts) and self.names.get(name) != shard_name:
                    place = f"places in {self.names[name]}" if name in self.names else "does not list"
                    raise ValueError(f"{self.path / shard_name} holds tensor {shown(name)}, which the index {place}")


def _mismatches(missing: list[str], unknown: list[str]) -> list[str]:
    """The first few of each kind, in words."""
    said = []
    for label, names in (("missing", missing), ("unknown", unknown)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            said.append(f"{label} {', '.join(shown(name) for name in names[:3])}{more}")
    return said


def _read_index(path: Path, folder: Path) -> dict[str, str]:
    names = read_json_object(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(names, dict) or not set(map(type, names.values())) <= {str}:
        raise ValueError(f"{path}: weight_map must be an object that maps tensor names to file names")
    for file_name in set(names.values()):
        _require_local(file_name, folder)
    return names


def _require_local(file_name: str, folder: Path) -> None:
    """A shard's name must stay in its folder on any system: relative, no `..`, no drive, no backslash."""
    posix, windows = PurePosixPath(file_name), PureWindowsPath(file_name)
    outside = posix.is_absolute() or windows.drive or windows.root or ".." in posix.parts
    if outside or "\\" in file_name or "\0" in file_name or posix.suffix != ".safetensors":
        raise ValueError(f"{folder / INDEX}: {shown(file_name)} is not the name of a .safetensors file in this folder")


def _inside(folder: Path, file_name: str) -> Path:
    """`folder / file_name` after links are followed, which must stay in the folder.

    The one exception is the layout of the Hugging Face cache, `REPO/snapshots/REVISION/file -> REPO/blobs/HASH`.
    """
    path = folder / file_name
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; is the download complete?")
    root, target = folder.resolve(), path.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(place) for place in allowed):
        raise ValueError(
            f"{path} is a link to {target}, outside the checkpoint's folder; a checkpoint may not lead elsewhere"
        )
    return path
