"""Files that commands write: whole or not at all, and JSON that every parser reads."""

import dataclasses
import json
import math
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def require_writable(path: Path) -> None:
    """Raises before work starts what `write_text` would raise after it.

    Raises:
        ValueError: the folder does not exist or takes no new file of that name, or `path` is a folder.
    """
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: {path.parent} is not a folder")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file")
    try:
        unfinished = _unfinished(path)
        unfinished.touch(exist_ok=False)
        unfinished.unlink()
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None


def write_text(path: Path, text: str) -> None:
    """Writes under a temporary name and renames, so that a failure leaves no half-written file behind."""
    unfinished = _unfinished(path)
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _unfinished(path: Path) -> Path:
    """A new name beside `path`."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.unfinished")


def write_json(path: Path, value: object) -> None:
    """`value`, which may hold dataclasses, as JSON; infinities and NaN as strings, which strict parsers accept."""
    write_text(path, json.dumps(jsonable(value), indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def jsonable(value: Any) -> Any:
    """The same value out of dicts, lists, strings, finite numbers, booleans and None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    assert isinstance(value, Path), type(value)
    return str(value)
