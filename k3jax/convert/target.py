"""The folder that conversions are written to: one converter at a time, whole layers only.

OUT/k3jax-convert.json    what it is made from and how; the same for all of its layers
OUT/layer-00001/          one layer: an orbax checkpoint, and k3jax-layer.json with what was written
OUT/.lock                 held by the converter that is running
OUT/.layer-...            unfinished; removed by the next converter
"""

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from k3jax import outputs
from k3jax.strict_json import read_json_object, shown

TARGET = "k3jax-convert.json"
LAYER = "k3jax-layer.json"
FORMAT = "k3jax-converted-1"
LAYOUT_VERSION = 1  # Count up whenever a kernel's layout or the names of the arrays change.
_FIELDS = {
    TARGET: {"layout_version", "source", "model", "config", "recipe", "dense_weights", "implementation"},
    LAYER: {"layer", "experts", "arrays", "shards"},
}
_LOCK = ".lock"
_UNFINISHED = ".layer-"
_MAX_BYTES = 5_000_000


def is_converted(path: str | Path) -> bool:
    """Whether `path` is a folder that `k3jax convert` wrote."""
    return (Path(path) / TARGET).is_file()


def layer_folder(target: Path, layer: int) -> Path:
    """Where a converted layer lies."""
    return target / f"layer-{layer:05d}"


def read_record(path: Path) -> dict[str, Any]:
    """The record of a target or of a layer.

    Raises:
        FileNotFoundError: there is none. ValueError: it is not of this format.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; k3jax convert writes it last")
    record = read_json_object(path, _MAX_BYTES)
    if record.get("format") != FORMAT:
        raise ValueError(f"{path}: format {shown(record.get('format'))} is not {FORMAT}; convert again")
    missing = _FIELDS[path.name] - record.keys()
    if missing:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}; convert again")
    if path.name == TARGET:
        _require_target(record, path)
    return record


def _require_target(record: dict[str, Any], path: Path) -> None:
    """Raises ValueError unless the record has what loading goes by; the rest is only compared."""
    if record["layout_version"] != LAYOUT_VERSION:
        version = shown(record["layout_version"])
        raise ValueError(f"{path}: layout_version {version} is not {LAYOUT_VERSION}; convert again, to another folder")
    for name, kind in (("source", str), ("config", dict)):
        if not isinstance(record[name], kind):
            raise ValueError(f"{path}: {name} is {shown(record[name])}; convert again, to another folder")


def converted_layers(target: Path) -> list[int]:
    """The numbers of the layers that are there, whole."""
    names = [path.parent.name.removeprefix("layer-") for path in target.glob(f"layer-*/{LAYER}")]
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal())


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """Holds the target for this process, and clears away what a converter that died has left.

    Raises:
        ValueError: `target` holds something else, or another converter is at work in it.
        OSError: it cannot be written.
    """
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; name a folder to write to")
    if target.is_dir() and not is_converted(target) and any(not path.name.startswith(".") for path in target.iterdir()):
        raise ValueError(f"{target} holds other files; name a new folder, or one that k3jax convert wrote")
    target.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(target / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(descriptor, target)
        for path in target.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(path)
        yield
    finally:
        os.close(descriptor)  # which gives the lock back, as the end of the process does


@contextlib.contextmanager
def new_layer(target: Path, layer: int) -> Iterator[Path]:
    """A new folder that becomes `layer`'s when the block ends well, in place of what was there; nothing otherwise."""
    folder, token = layer_folder(target, layer), uuid.uuid4().hex
    unfinished = target / f"{_UNFINISHED}{layer:05d}.{token}.unfinished"
    unfinished.mkdir()
    try:
        yield unfinished
        _sync(unfinished)
        if folder.exists():
            folder.rename(target / f"{_UNFINISHED}{layer:05d}.{token}.replaced")
        unfinished.rename(folder)
        _sync_folder(target)
    finally:
        for path in target.glob(f"{_UNFINISHED}{layer:05d}.{token}.*"):
            shutil.rmtree(path, ignore_errors=True)


def write_record(path: Path, values: dict[str, Any]) -> None:
    """Writes a record: sorted, without a date, so that the same conversion gives the same bytes."""
    outputs.write_json(path, dict(sorted({"format": FORMAT, **values}.items())))


def _lock(descriptor: int, target: Path) -> None:
    try:
        import fcntl
    except ImportError:
        raise NotImplementedError("k3jax convert needs a system with flock, to keep converters apart") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another k3jax convert is writing to {target}; wait for it, or name another folder") from None


def _sync(folder: Path) -> None:
    for root, _, names in os.walk(folder):
        for name in names:
            with (Path(root) / name).open("rb") as file:
                os.fsync(file.fileno())
        _sync_folder(Path(root))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
