"""Tensors to safetensors files of bounded size, numbered once it is known how many there are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from k3jax.checkpoint.safetensors_file import DTYPES
from k3jax.checkpoint.safetensors_writer import NewTensor, write_header, write_tensor

Read = Callable[[], np.ndarray]


class ShardWriter:
    """Collects tensors and writes a file whenever the next one would make it larger than `max_bytes`.

    Tensors are read when their file is written. `finish` names the files and gives the index.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._pending: list[tuple[NewTensor, Read]] = []
        self._pending_bytes = 0
        self._shards: list[list[NewTensor]] = []
        self._names: set[str] = set()

    def add(self, tensor: NewTensor, read: Read) -> None:
        """Raises ValueError for a tensor that is there already, or is larger than a file may be."""
        if tensor.name in self._names:
            raise ValueError(f"tensor {tensor.name!r} is to be saved twice")
        if tensor.nbytes > self._max_bytes:
            raise ValueError(
                f"max_shard_bytes={self._max_bytes} is too small: tensor {tensor.name!r} has {tensor.nbytes} bytes"
            )
        if self._pending_bytes + tensor.nbytes > self._max_bytes:
            self.flush()
        self._names.add(tensor.name)
        self._pending.append((tensor, read))
        self._pending_bytes += tensor.nbytes

    def flush(self) -> None:
        """Writes what was collected to a file of its own."""
        if not self._pending:
            return
        # Wider first, so that each tensor is aligned.
        ordered = sorted(self._pending, key=lambda item: -DTYPES[item[0].dtype].itemsize)
        with (self._folder / _unnumbered(len(self._shards))).open("xb") as file:
            write_header(file, [tensor for tensor, _ in ordered], {"format": "pt"})
            for tensor, read in ordered:
                write_tensor(file, tensor, [read()])
        self._shards.append([tensor for tensor, _ in ordered])
        self._pending, self._pending_bytes = [], 0

    def finish(self) -> dict[str, Any]:
        """Writes the rest, numbers the files as the release does, and returns the index."""
        self.flush()
        weight_map: dict[str, str] = {}
        for number, tensors in enumerate(self._shards):
            name = f"model-{number + 1:05d}-of-{len(self._shards):06d}.safetensors"
            (self._folder / _unnumbered(number)).rename(self._folder / name)
            weight_map |= dict.fromkeys((tensor.name for tensor in tensors), name)
        total = sum(tensor.nbytes for tensors in self._shards for tensor in tensors)
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _unnumbered(number: int) -> str:
    return f"unnumbered-{number}.safetensors"
