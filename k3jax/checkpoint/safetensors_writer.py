"""Writing a safetensors file as a stream: the header first, then tensor after tensor, chunk by chunk."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from k3jax.checkpoint.safetensors_file import DTYPES

_ALIGNMENT = 8


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write; `dtype` is safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def write_header(file: BinaryIO, tensors: Sequence[NewTensor], metadata: Mapping[str, str]) -> None:
    """Writes the header for `tensors`, whose data must follow in this order; wider dtypes come first, to be aligned."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for tensor in tensors:
        if at % DTYPES[tensor.dtype].itemsize:
            raise ValueError(
                f"tensor {tensor.name!r} ({tensor.dtype}) would begin at byte {at}: put wider dtypes first"
            )
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-len(text) % _ALIGNMENT)  # So that the data begins at a multiple of 8.
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)


def write_tensor(file: BinaryIO, tensor: NewTensor, chunks: Iterable[np.ndarray]) -> None:
    """Writes the data of `tensor`: little-endian C-contiguous arrays whose bytes add up to it."""
    written = 0
    for chunk in chunks:
        written += file.write(np.ascontiguousarray(chunk).view(np.uint8).data)
    assert written == tensor.nbytes, f"{tensor.name}: {written} bytes for {tensor.nbytes}"


def write_safetensors(path: Path, arrays: Mapping[str, tuple[str, np.ndarray]]) -> None:
    """Writes `name -> (dtype, array)` in the given order to the new file `path`."""
    tensors = [NewTensor(name, dtype, array.shape) for name, (dtype, array) in arrays.items()]
    with path.open("xb") as file:
        write_header(file, tensors, {})
        for tensor in tensors:
            write_tensor(file, tensor, [arrays[tensor.name][1]])
