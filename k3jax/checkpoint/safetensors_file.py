"""Reading one safetensors file that nobody vouches for.

A file is `u64 header length | JSON header | tensor bytes`. Everything the header claims is checked against the file's
real size before a byte of a tensor is touched, so that a damaged or hostile file costs one bounded JSON parse, then
raises `ValueError`. Tensors come back as read-only views of a memory map: nothing is copied.
"""

import json
import math
import mmap
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

MAX_HEADER_BYTES = 100_000_000  # The format's own limit; the header of one of Kimi K3's shards takes about 1 MB.
MAX_ELEMENTS = 2**59  # A shape whose non-zero dimensions multiply to more overflows NumPy's strides.
MAX_RANK = 64  # NumPy's limit.
LENGTH_BYTES = 8

_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}  # Legal in a header, but narrower than a byte: such a tensor can be listed, not read.
DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
}
_BITS |= {name: 8 * dtype.itemsize for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """What a header says of one tensor. `begin` and `end` are bytes from the start of the file's data section."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile(Mapping[str, np.ndarray]):
    """A checked, memory-mapped safetensors file: a mapping from tensor name to a read-only array.

    The map stays open as long as the object or any array from it lives. The file must not be shortened meanwhile.
    """

    def __init__(self, path: str | Path) -> None:
        """Open and check `path`.

        Raises FileNotFoundError when there is no such file, ValueError when it isn't a well-formed safetensors file.
        """
        self.path = Path(path)
        status = self.path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{self.path} is not a regular file; expected a safetensors file")
        with self.path.open("rb") as file:
            header = _read_header(file.read, self.path, status.st_size)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._data_start = LENGTH_BYTES + len(header)
        parsed = _parse_header(header, self.path)
        self.metadata: dict[str, str] = _metadata(parsed.pop("__metadata__", {}), self.path)
        data_bytes = status.st_size - self._data_start
        self.entries: dict[str, TensorEntry] = {
            name: _entry(name, value, data_bytes, self.path) for name, value in parsed.items()
        }
        _check_layout(self.entries, data_bytes, self.path)

    def __getitem__(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the file.

        Raises:
            KeyError: there is no such tensor.
            NotImplementedError: its dtype is narrower than a byte.
        """
        entry = self.entries[name]
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise NotImplementedError(
                f"{self.path}: tensor {shown(name)} has dtype {entry.dtype}, which k3jax can list but not read"
            )
        count = math.prod(entry.shape)
        if count == 0:  # np.frombuffer takes no empty views.
            array = np.empty(entry.shape, dtype)
            array.flags.writeable = False
            return array
        return np.frombuffer(self._map, dtype, count, self._data_start + entry.begin).reshape(entry.shape)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def shown(name: object, limit: int = 200) -> str:
    """`repr(name)`, cut: a name from an untrusted file may hold control characters, or a megabyte."""
    try:
        text = repr(name[:limit] if isinstance(name, str) else name)
    except RecursionError:
        text = f"a deeply nested {type(name).__name__}"
    return text if len(text) <= limit + 2 else text[:limit] + "..."


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object with its keys checked to be unique, for `json.loads(object_pairs_hook=...)`."""
    result = dict(pairs)
    if len(result) != len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {shown(key)} appears twice")
    return result


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


def _read_header(read: Callable[[int], bytes], path: Path, file_bytes: int) -> bytes:
    prefix = read(LENGTH_BYTES)
    if len(prefix) < LENGTH_BYTES:
        raise ValueError(
            f"{path} is truncated: {file_bytes} bytes, a safetensors file begins with an {LENGTH_BYTES}-byte length"
        )
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(
            f"{path}: header of {length} bytes announced, the limit is {MAX_HEADER_BYTES}; is this a safetensors file?"
        )
    if length > file_bytes - LENGTH_BYTES:
        raise ValueError(
            f"{path} is truncated: header of {length} bytes announced, the file has {file_bytes} bytes; download again"
        )
    header = read(length)
    if len(header) != length:
        raise ValueError(f"{path} is truncated: header of {length} bytes announced, {len(header)} could be read")
    return header


def _parse_header(header: bytes, path: Path) -> dict[str, Any]:
    if not header.startswith(b"{"):
        raise ValueError(f"{path}: header must begin with '{{', got {header[:1]!r}; is this a safetensors file?")
    parsed = parse_json_object(header, f"{path}: header")
    for name in parsed:
        if not name.isascii() and any("\ud800" <= character <= "\udfff" for character in name):
            raise ValueError(f"{path}: tensor name {shown(name)} is not valid Unicode")
    return parsed


def _metadata(value: object, path: Path) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise ValueError(f"{path}: __metadata__ must map strings to strings")
    return value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _entry(name: str, value: object, data_bytes: int, path: Path) -> TensorEntry:
    what = f"{path}: tensor {shown(name)}"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{what}: expected an object with dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"{what}: unknown dtype {shown(dtype)}; known are {', '.join(sorted(_BITS))}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(_is_count(size) for size in shape):
        raise ValueError(
            f"{what}: shape must be a list of at most {MAX_RANK} non-negative integers, got {shown(shape)}"
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise ValueError(f"{what}: data_offsets must be two non-negative integers, got {shown(offsets)}")
    begin, end = offsets
    if begin > end:
        raise ValueError(f"{what}: data_offsets begin after their end: {begin} > {end}")
    if end > data_bytes:
        raise ValueError(
            f"{what}: ends at byte {end} of the data, the file has {data_bytes}: it is truncated; download it again"
        )
    _check_bytes(shape, _BITS[dtype], end - begin, f"{what} ({dtype})")
    return TensorEntry(dtype, tuple(shape), begin, end)


def _check_bytes(shape: list[int], bits: int, stored: int, what: str) -> None:
    elements = 1
    for size in shape:  # Stop early: the product of a hostile shape has thousands of digits.
        elements *= max(size, 1)
        if elements > MAX_ELEMENTS:
            raise ValueError(f"{what}: shape {shown(shape)} has too many elements")
    needed = 0 if 0 in shape else elements * bits
    if needed != 8 * stored:
        raise ValueError(f"{what}: shape {shape} needs {needed / 8:g} bytes, data_offsets span {stored}")


def _check_layout(entries: Mapping[str, TensorEntry], data_bytes: int, path: Path) -> None:
    """Tensors tile the data: no byte belongs to two of them, or to none (a second file could hide in a hole)."""
    at, before = 0, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin < at:
            raise ValueError(
                f"{path}: tensor {shown(name)} overlaps {before}: it begins at byte {entry.begin}, before {at}"
            )
        if entry.begin > at:
            raise ValueError(
                f"{path}: bytes {at} to {entry.begin}, between {before} and tensor {shown(name)}, belong to no tensor"
            )
        at, before = entry.end, f"tensor {shown(name)}"
    if at != data_bytes:
        raise ValueError(f"{path}: {data_bytes - at} bytes after {before} belong to no tensor")
