"""Folders that are made once and kept in the user's cache, whole or not at all."""

import hashlib
import json
import os
import shutil
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

RECORD = "sha256.json"  # File name -> digest, written last into each cached folder.
_ATTEMPTS = 5


def cache_root() -> Path:
    """Where k3jax keeps what it can make again: `$K3JAX_CACHE`, or `k3jax` in the system's folder for caches."""
    if given := os.environ.get("K3JAX_CACHE"):
        return Path(given)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "k3jax"
    base = Path(os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME") or "")
    return (base if base.is_absolute() else Path.home() / ".cache") / "k3jax"


def cached_folder(name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name` in the cache, made by `make(new_folder)` if it is not there or is not what was once made.

    Processes may race: each sees either nothing or a complete folder, and the first to finish wins.

    Raises:
        OSError: the cache cannot be written.
    """
    folder = cache_root() / name
    if _is_intact(folder):
        return folder
    unfinished = folder.with_name(f".{name}.{uuid.uuid4().hex}.unfinished")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        make(unfinished)
        (unfinished / RECORD).write_text(json.dumps(_digests(unfinished), indent=2, sort_keys=True))
        _install(unfinished, folder)
    except OSError as error:
        raise type(error)(f"{folder} cannot be written ({error}); set K3JAX_CACHE to a folder that can") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _digests(folder: Path) -> dict[str, str]:
    digests = {}
    for path in sorted(folder.iterdir()):
        if path.name != RECORD:
            with path.open("rb") as file:
                digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _is_intact(folder: Path) -> bool:
    try:
        return json.loads((folder / RECORD).read_bytes()) == _digests(folder)
    except (OSError, ValueError):
        return False


def _install(unfinished: Path, folder: Path) -> None:
    """Renames into place; what is there already stays if it is intact (another process was quicker), else it goes."""
    for attempt in range(_ATTEMPTS):
        try:
            unfinished.rename(folder)
            return
        except OSError:
            if _is_intact(folder):
                return
            if attempt + 1 == _ATTEMPTS:
                raise
            _remove(folder)


def _remove(folder: Path) -> None:
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.damaged")
    try:
        folder.rename(aside)
    except FileNotFoundError:  # Another process has just moved it.
        return
    if aside.is_dir():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.unlink()
