"""One layer's tensors, checked and located but not yet read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from k3jax.checkpoint.safetensors_file import SafetensorsFile, TensorEntry


@dataclass(frozen=True)
class Place:
    """Where a tensor's bytes lie: `entry` of `file`, whose name for it is `name`."""

    file: SafetensorsFile
    name: str

    @property
    def entry(self) -> TensorEntry:
        """What the file's header says of it."""
        return self.file.entries[self.name]


class LayerTensors(Mapping):  # unsubscripted: annotation checkers would read a tensor to see that it is one
    """A layer's tensors by suffix (`mlp.up_proj.weight`), each read from its file at each access: nothing is kept.

    Attributes:
        places: suffix -> where its bytes are, for readers that know better where to put them.
        stored: stem of a weight -> "plain", "mxfp4" or "nvfp4", as `tensor_table.py` has it.
    """

    def __init__(self, places: Mapping[str, Place], stored: Mapping[str, str]) -> None:
        self.places = places
        self.stored = stored

    def __getitem__(self, suffix: str) -> np.ndarray:
        """The tensor in its stored dtype, not to be written to.

        Raises:
            KeyError: the layer has no such tensor.
            ValueError: its file was cut short meanwhile.
        """
        place = self.places[suffix]
        return place.file[place.name]

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors as stored."""
        return sum(place.entry.nbytes for place in self.places.values())

    def dtype(self, suffix: str) -> np.dtype:
        """The stored dtype, without reading the tensor."""
        place = self.places[suffix]
        return place.file.dtype(place.name)

    def shape(self, stem: str) -> tuple[int, ...]:
        """The shape (out, in) of the weight `stem`, however it is stored."""
        if self.stored[stem] == "plain":
            return self.places[f"{stem}.weight"].entry.shape
        rows, half = self.places[f"{stem}.weight{'_packed' if self.stored[stem] == 'mxfp4' else ''}"].entry.shape
        return rows, 2 * half

    def require_unchanged(self) -> None:
        """Raises ValueError if one of the files was written to since it was opened."""
        for file in {place.file.path: place.file for place in self.places.values()}.values():
            file.require_unchanged()

    def __contains__(self, suffix: object) -> bool:
        return suffix in self.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)
