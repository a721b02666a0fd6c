"""Reading one safetensors file that nobody vouches for.

A file is `u64 header length | JSON header | tensor bytes`. Everything the header claims is checked against the file's
real size before a byte of a tensor is touched, so that a damaged or hostile file costs one bounded JSON parse, then
raises `ValueError`. Tensors are read, never mapped: a file that shrinks under a map kills the process, while a read
that comes up short is an error like any other.
"""

import hashlib
import os
import stat
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from k3jax.strict_json import parse_json_object, shown

MAX_HEADER_BYTES = 100_000_000  # The format's own limit; the header of one of Kimi K3's shards takes about 1 MB.
MAX_ELEMENTS = 2**59  # A shape whose non-zero dimensions multiply to more overflows NumPy's strides.
MAX_RANK = 64  # NumPy's limit.
LENGTH_BYTES = 8

# Without O_NONBLOCK, opening a pipe waits for a writer; regular files do not care.
_OPEN_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_BINARY", "O_CLOEXEC", "O_NONBLOCK"))
_MAX_PARTS = 512  # of one preadv; Linux takes 1024
_SEEK = threading.Lock()  # Where there is no preadv, one thread at a time moves a file's position and reads.

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
_FIELDS = {"dtype", "shape", "data_offsets"}


class TensorEntry(NamedTuple):
    """What a header says of one tensor. `begin` and `end` are bytes from the start of the file's data section."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return self.end - self.begin


class SafetensorsFile(Mapping):  # unsubscripted: annotation checkers would read a tensor to see that it is one
    """A checked safetensors file: a mapping from tensor name to a read-only array, read anew at each access.

    The file stays open as long as the object lives, so that what was checked is what is read.
    """

    def __init__(self, path: str | Path) -> None:
        """Open and check `path`.

        Raises FileNotFoundError when there is no such file, ValueError when it isn't a well-formed safetensors file.
        """
        self.path = Path(path)
        self._of_thread = threading.local()
        self._descriptor = self._open()
        self._status = os.fstat(self._descriptor)
        if not stat.S_ISREG(self._status.st_mode):
            raise ValueError(f"{self.path} is not a regular file; expected a safetensors file")
        file_bytes = self._status.st_size
        header = _read_header(lambda size: os.read(self._descriptor, size), self.path, file_bytes)
        self.data_start = LENGTH_BYTES + len(header)
        self.header_sha256 = hashlib.sha256(header).hexdigest()
        parsed = _parse_header(header, self.path)
        self.metadata: dict[str, str] = _metadata(parsed.pop("__metadata__", {}), self.path)
        data_bytes = file_bytes - self.data_start
        self.entries: dict[str, TensorEntry] = {}
        for name, value in parsed.items():
            try:
                self.entries[name] = _entry(value, data_bytes)
            except ValueError as error:
                raise ValueError(f"{self.path}: tensor {shown(name)}: {error}") from None
        _check_layout(self.entries, data_bytes, self.path)

    def __getitem__(self, name: str) -> np.ndarray:
        """The tensor, read into memory of its own; not to be written to.

        Raises:
            KeyError: there is no such tensor.
            NotImplementedError: its dtype is narrower than a byte.
            ValueError: the file has become shorter since it was opened.
        """
        entry = self.entries[name]
        array = np.empty(entry.shape, self.dtype(name))
        self.read_into(entry.begin, [array])
        array.flags.writeable = False
        return array

    def dtype(self, name: str) -> np.dtype:
        """NumPy's dtype for the tensor.

        Raises:
            NotImplementedError: it is narrower than a byte.
        """
        dtype = DTYPES.get(self.entries[name].dtype)
        if dtype is None:
            raise NotImplementedError(
                f"{self.path}: tensor {shown(name)} has dtype {self.entries[name].dtype}, which k3jax can list but not "
                "read"
            )
        return dtype

    def read_into(self, begin: int, arrays: Sequence[np.ndarray]) -> None:
        """Fills C-contiguous `arrays`, one after another, with the data section's bytes from `begin` on.

        Raises:
            OSError: it cannot be read. ValueError: it has become shorter since it was opened.
        """
        left = [memoryview(array.reshape(-1).view(np.uint8)) for array in arrays if array.nbytes]
        at = self.data_start + begin
        descriptor = self._descriptor_of_thread()
        while left:
            try:
                read = _read_at(descriptor, left[:_MAX_PARTS], at)
            except OSError as error:  # which does not name the file
                raise OSError(error.errno, f"{error.strerror}, at byte {at}", str(self.path)) from error
            if read == 0:
                raise ValueError(f"{self.path} ends at byte {at}: it was cut short while it was being read")
            at += read
            while left and read >= len(left[0]):
                read -= len(left.pop(0))
            if read:
                left[0] = left[0][read:]

    def _open(self) -> int:
        descriptor = os.open(self.path, _OPEN_FLAGS)
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def _descriptor_of_thread(self) -> int:
        """The file opened by this thread: a system reads ahead by descriptor, and threads that share one confuse it."""
        if threading.current_thread() is threading.main_thread():
            return self._descriptor
        if not hasattr(self._of_thread, "descriptor"):
            descriptor = self._open()
            if not os.path.samestat(os.fstat(descriptor), self._status):
                raise ValueError(f"{self.path} was replaced while it was being read; load it again")
            self._of_thread.descriptor = descriptor
        found: int = self._of_thread.descriptor
        return found

    @property
    def size(self) -> int:
        """Bytes of the file when it was opened."""
        return self._status.st_size

    @property
    def modified_ns(self) -> int:
        """When the file was last written to before it was opened, in nanoseconds since 1970."""
        return self._status.st_mtime_ns

    def require_unchanged(self) -> None:
        """Raises ValueError if the opened file was written to or cut since its header was read."""
        now = os.fstat(self._descriptor)
        if (now.st_size, now.st_mtime_ns) != (self._status.st_size, self._status.st_mtime_ns):
            raise ValueError(f"{self.path} was changed while it was being read; load it again when it is complete")

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def _read_at(descriptor: int, parts: list[memoryview], at: int) -> int:
    """Fills `parts` in order from byte `at` of the file, as far as one call goes; the number of bytes, 0 at its end."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, parts, at)
    with _SEEK:
        os.lseek(descriptor, at, os.SEEK_SET)
        read = os.read(descriptor, len(parts[0]))
    parts[0][: len(read)] = read
    return len(read)


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
    header = b""
    while len(header) < length and (more := read(length - len(header))):
        header += more
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


def _entry(value: object, data_bytes: int) -> TensorEntry:
    """What a header says of a tensor. Raises ValueError, which leaves it to the caller to name the tensor."""
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        raise ValueError("expected an object with dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"unknown dtype {shown(dtype)}; known are {', '.join(sorted(_BITS))}")
    bits = _bits(dtype, shape)
    begin, end = offsets if isinstance(offsets, list) and len(offsets) == 2 else (None, None)
    if type(begin) is not int or type(end) is not int or begin < 0 or end < 0:  # A bool is an instance of int.
        raise ValueError(f"data_offsets must be two non-negative integers, got {shown(offsets)}")
    if begin > end:
        raise ValueError(f"data_offsets begin after their end: {begin} > {end}")
    if end > data_bytes:
        raise ValueError(
            f"ends at byte {end} of the data, the file has {data_bytes}: it is truncated; download it again"
        )
    if bits != 8 * (end - begin):
        raise ValueError(f"{dtype} shape {shape} needs {bits / 8:g} bytes, data_offsets span {end - begin}")
    return TensorEntry(dtype, tuple(shape), begin, end)


def _bits(dtype: str, shape: object) -> int:
    """Size of a tensor in bits, if that is what a shape may be."""
    sizes = shape if isinstance(shape, list) and len(shape) <= MAX_RANK else [None]
    elements = 1
    for size in sizes:
        if type(size) is not int or size < 0:
            raise ValueError(f"shape must be a list of at most {MAX_RANK} non-negative integers, got {shown(shape)}")
        elements *= size or 1
        if elements > MAX_ELEMENTS:  # Stop early: the product of a hostile shape has thousands of digits.
            raise ValueError(f"{dtype} shape {shown(shape)} has too many elements")
    return 0 if 0 in sizes else elements * _BITS[dtype]


def _check_layout(entries: Mapping[str, TensorEntry], data_bytes: int, path: Path) -> None:
    """Tensors tile the data: no byte belongs to two of them, or to none (a second file could hide in a hole)."""
    at, last = 0, None
    for begin, end, name in sorted((entry.begin, entry.end, name) for name, entry in entries.items()):
        if begin < at:
            raise ValueError(
                f"{path}: tensor {shown(name)} overlaps {_named(last)}: it begins at byte {begin}, before {at}"
            )
        if begin > at:
            raise ValueError(
                f"{path}: bytes {at} to {begin}, between {_named(last)} and {_named(name)}, belong to no tensor"
            )
        at, last = end, name
    if at != data_bytes:
        raise ValueError(f"{path}: {data_bytes - at} bytes after {_named(last)} belong to no tensor")


def _named(name: str | None) -> str:
    return "the header" if name is None else f"tensor {shown(name)}"
