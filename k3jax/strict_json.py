"""JSON that nobody vouches for: bounded, strict, and quoted safely in messages."""

import json
from collections import Counter
from pathlib import Path
from typing import Any


def shown(name: object, limit: int = 200) -> str:
    """`repr(name)`, cut: a name from an untrusted file may hold control characters, or a megabyte."""
    try:
        text = repr(name[:limit] if isinstance(name, str) else name)
    except RecursionError:
        text = f"a deeply nested {type(name).__name__}"
    return text if len(text) <= limit + 2 else text[:limit] + "..."


def parse_json_object(text: bytes, what: str) -> dict[str, Any]:
    """Strict JSON: UTF-8, one object, no key twice, no NaN. Raises ValueError, which begins with `what`."""

    def no_constant(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_object, parse_constant=no_constant)
    except RecursionError:
        raise ValueError(f"{what} is not a JSON object k3jax can read: it is nested too deeply") from None
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors too.
        raise ValueError(f"{what} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a JSON object, got {type(value).__name__}")
    return value


def read_json_object(path: Path, limit: int) -> dict[str, Any]:
    """The strict JSON object in the regular file `path` of at most `limit` bytes.

    Raises:
        ValueError: it is no regular file, is larger, or is not such an object.
    """
    if not path.is_file():  # A pipe would never end.
        raise ValueError(f"{path} is not a regular file")
    size = path.stat().st_size
    if size > limit:
        raise ValueError(f"{path} has more than {limit} bytes; that is no file of this kind")
    with path.open("rb") as file:
        text = file.read(size)
    return parse_json_object(text, str(path))


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object with its keys checked to be unique, for `json.loads(object_pairs_hook=...)`."""
    result = dict(pairs)
    if len(result) != len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {shown(key)} appears twice")
    return result
