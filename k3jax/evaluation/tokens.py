"""Token files: what layers are fed, read row by row as it is needed.

*.npy          [T, D], float16 or float32: the input of every layer
*.safetensors  `tokens` [T, D], float16, bfloat16 or float32: the input of every layer; or `layers.N.input` [T, D] for
               each layer N, and maybe `layers.N.output` to hold the layer's output against, as a capture has them
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3jax.checkpoint.safetensors_file import DTYPES, SafetensorsFile

Array = NDArray[Any]
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Rows:
    """An array `[T, D]` that stays in its file, from byte `offset` on, C-contiguous."""

    path: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, start: int, stop: int) -> Array:
        """Rows `start` to `stop`, or to the last one, in the machine's byte order.

        Raises:
            ValueError: the file has become shorter since it was opened.
        """
        count = max(min(stop, len(self)) - start, 0) * self.shape[1]
        offset = self.offset + start * self.shape[1] * self.dtype.itemsize
        read = np.fromfile(self.path, self.dtype, count, offset=offset)
        if read.size != count:
            raise ValueError(f"{self.path} was cut short while {self.name} was being read")
        return read.astype(self.dtype.newbyteorder("="), copy=False).reshape(-1, self.shape[1])


@dataclass(frozen=True)
class TokenFile:
    """A checked token file.

    Attributes:
        inputs: layer -> `[T, D]`; the key None stands for every layer. outputs: layer -> `[T, D]`, where given.
    """

    path: Path
    inputs: dict[int | None, Rows]
    outputs: dict[int, Rows]

    @classmethod
    def open(cls, path: str | Path, hidden_size: int) -> "TokenFile":
        """Opens `path`, whose rows must have `hidden_size` elements.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no token file; the message names the tensor.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; a token file is a .npy or .safetensors file of [T, D]")
        if path.suffix == ".npy":
            return cls(path, {None: _checked(_npy(path), hidden_size)}, {})
        if path.suffix != ".safetensors":
            raise ValueError(f"{path} must end in .npy or .safetensors")
        file = SafetensorsFile(path)
        if "tokens" in file:
            return cls(path, {None: _checked(_tensor(file, "tokens"), hidden_size)}, {})
        inputs: dict[int | None, Rows] = {}
        outputs: dict[int, Rows] = {}
        for name in file:
            prefix, _, rest = name.partition(".")
            layer, _, stage = rest.partition(".")
            if prefix != "layers" or not layer.isdecimal() or stage not in ("input", "output"):
                continue
            rows = _checked(_tensor(file, name), hidden_size)
            if stage == "input":
                inputs[int(layer)] = rows
            else:
                outputs[int(layer)] = rows
        if not inputs:
            raise ValueError(f"{path} holds neither a tensor called tokens nor one called layers.N.input")
        for number, output in outputs.items():
            given = inputs.get(number)
            if given is not None and given.shape != output.shape:
                raise ValueError(f"{path}: layer {number} has input {given.shape} but output {output.shape}")
        return cls(path, inputs, outputs)

    def of_layer(self, layer: int) -> Rows:
        """The input of `layer`, `[T, D]`.

        Raises:
            ValueError: the file has none for it.
        """
        given = self.inputs.get(layer, self.inputs.get(None))
        if given is None:
            raise ValueError(f"{self.path} has no input for layer {layer}; it has {', '.join(map(str, self.layers))}")
        return given

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have an input of their own; empty where one input is for all."""
        return tuple(sorted(layer for layer in self.inputs if layer is not None))


def _npy(path: Path) -> Rows:
    with path.open("rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(file)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path} is not a well-formed .npy file: {error}") from None
        if fortran:
            raise ValueError(f"{path} is stored column by column; save np.ascontiguousarray of it")
        return Rows(path, "the array", dtype, shape, file.tell())


def _tensor(file: SafetensorsFile, name: str) -> Rows:
    entry = file.entries[name]
    dtype = DTYPES.get(entry.dtype, np.dtype(np.void))
    return Rows(file.path, name, dtype, entry.shape, file.data_start + entry.begin)


def _checked(rows: Rows, hidden_size: int) -> Rows:
    what = f"{rows.path}: {rows.name}"
    if rows.dtype.name not in _DTYPES:
        raise ValueError(f"{what} is {rows.dtype.name}, not {' or '.join(_DTYPES)}")
    if len(rows.shape) != 2 or rows.shape[1] != hidden_size or not rows.shape[0]:
        raise ValueError(f"{what} has the shape {rows.shape}, not [T, {hidden_size}] with at least one token")
    return rows
