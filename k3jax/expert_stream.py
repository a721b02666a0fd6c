"""Routed experts from a checkpoint's files to devices: in chunks, read ahead, each byte once.

Where a device shares memory with the host and wants the bytes as they are stored, they are read straight to their final
place. Elsewhere a chunk of experts is read to a buffer, from which the devices that want some of it take that
(`expert_arrays.py`); at most `depth` chunks of `chunk_bytes` are in host memory at a time.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.checkpoint import LayerTensors
from k3jax.checkpoint.buffers import ALIGNMENT, Allocate, aligned, carver, padded
from k3jax.checkpoint.stream import Fill, ahead, fill
from k3jax.checkpoint.tensor_table import EXPERTS
from pallas_kernels import MXFP4Array, dequantize_nvfp4, quantize_mxfp4

_PARTS = {"w13": ("w1", "w3"), "w2": ("w2",)}
# The tensors of a weight by how it is stored, and into how many elements of its rows they have one; 0 for a scalar.
_TENSORS = {
    "mxfp4": {"weight_packed": 2, "weight_scale": 32},
    "nvfp4": {"weight": 2, "weight_scale": 16, "weight_scale_2": 0},
    "plain": {"weight": 1},
}

Raw = dict[str, dict[str, np.ndarray]]
"""w13 and w2 as stored: tensor -> `[experts, 2, rows, columns]` and `[experts, rows, columns]`; no rows of a scalar."""
Ready = dict[str, Any]
"""w13 and w2 as a layer takes them: a pytree of arrays `[experts, ...]` each."""
Convert = Callable[[Mapping[str, Mapping[str, Any]]], Ready]
"""From `Raw`, on a device, to `Ready`."""
Progress = Callable[[int, int], None]
"""Told how many of the bytes wanted are read, and how many that are."""


@dataclasses.dataclass(frozen=True)
class Window:
    """The part of the experts that some devices hold: experts `first` to `last`, `low` to `high` of their width F."""

    first: int
    last: int
    low: int
    high: int


@dataclasses.dataclass(frozen=True)
class Memory:
    """How much of the host's memory reading may take: `depth` chunks of `chunk_bytes`, or of one expert if larger."""

    chunk_bytes: int = 128 << 20
    depth: int = 8


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """Experts `first` to `last`, which all of these windows want."""

    first: int
    last: int
    windows: tuple[int, ...]


class ExpertReader:
    """Reads windows of a layer's experts.

    Args:
        tensors: the layer. num_experts, width, latent: E, F and L.

    Raises:
        NotImplementedError: experts are stored in several dtypes.
    """

    def __init__(self, tensors: LayerTensors, num_experts: int, width: int, latent: int) -> None:
        self.tensors = tensors
        self.stored = tensors.stored[f"{EXPERTS}0.w1"]
        self.dtype = tensors.dtype(f"{EXPERTS}0.w1.{next(iter(_TENSORS[self.stored]))}")
        if self.stored == "plain":
            self._require_one_dtype()
        self.num_experts, self.width, self.latent = num_experts, width, latent

    def _require_one_dtype(self) -> None:
        for stem in self.tensors.stored:
            if stem.startswith(EXPERTS) and (found := self.tensors.dtype(f"{stem}.weight")) != self.dtype:
                raise NotImplementedError(
                    f"{stem} is stored in {found} and other experts of its layer in {self.dtype}; k3jax reads one dtype"
                )

    def read_in_place(self, windows: Sequence[Window], memory: Memory, progress: Progress) -> list[Raw]:
        """Each window's experts as stored, in memory of their own that JAX's CPU backend takes over."""
        results = [self._allocate(window.last - window.first, window, aligned) for window in windows]

        def job(chunk: _Chunk) -> int:
            fills: list[Fill] = []
            for number in chunk.windows:
                window = windows[number]
                raw = _rows_of(results[number], chunk.first - window.first, chunk.last - window.first)
                fills += self._fills(window, chunk.first, raw)
            fill(fills)
            return sum(item.target.nbytes for item in fills)

        done, total = 0, self._wanted_nbytes(windows)
        jobs = (functools.partial(job, chunk) for chunk in self._chunks(windows, memory))
        for size in ahead(jobs, memory.depth):
            done += size
            progress(done, total)
        return results

    def read_through(
        self, windows: Sequence[Window], memory: Memory, progress: Progress, use: Callable[[int, int, Raw], None]
    ) -> None:
        """Calls `use(number, first, raw)` for chunk after chunk of experts and every one of the windows that wants it.

        `number` is the window's, `first` that of the chunk's first expert; `raw` is to be left alone when `use`
        returns.
        """
        chunks = list(self._chunks(windows, memory))
        size = max(self._chunk_nbytes(chunk, windows) for chunk in chunks)
        free = [np.empty(size + ALIGNMENT, np.uint8) for _ in range(min(memory.depth, len(chunks)))]
        done, total = 0, self._wanted_nbytes(windows)

        def jobs() -> Iterator[Callable[[], tuple[_Chunk, list[Raw], np.ndarray]]]:
            for chunk in chunks:
                yield functools.partial(job, chunk, free.pop())

        def job(chunk: _Chunk, buffer: np.ndarray) -> tuple[_Chunk, list[Raw], np.ndarray]:
            allocate, wanted = carver(buffer), [windows[number] for number in chunk.windows]
            raws = [self._allocate(chunk.last - chunk.first, window, allocate) for window in wanted]
            pairs = zip(wanted, raws, strict=True)
            fill([item for window, raw in pairs for item in self._fills(window, chunk.first, raw)])
            return chunk, raws, buffer

        for chunk, raws, buffer in ahead(jobs(), len(free)):
            for number, raw in zip(chunk.windows, raws, strict=True):
                use(number, chunk.first, raw)
                done += sum(array.nbytes for of_part in raw.values() for array in of_part.values())
            free.append(buffer)
            progress(done, total)

    def _wanted_nbytes(self, windows: Sequence[Window]) -> int:
        shapes = (of for window in windows for of in self._shapes(window.last - window.first, window).values())
        return sum(math.prod(shape) * dtype.itemsize for of in shapes for shape, dtype in of.values())

    def _shapes(self, count: int, window: Window) -> dict[str, dict[str, tuple[tuple[int, ...], np.dtype]]]:
        sizes = {"w13": (window.high - window.low, self.latent), "w2": (self.latent, window.high - window.low)}
        found: dict[str, dict[str, tuple[tuple[int, ...], np.dtype]]] = {}
        for name, parts in _PARTS.items():
            rows, columns = sizes[name]
            found[name] = {}
            for tensor, elements in _TENSORS[self.stored].items():
                lead = (count, len(parts)) if name == "w13" else (count,)
                shape = lead + ((rows, columns // elements) if elements else ())
                found[name][tensor] = shape, self.tensors.dtype(f"{EXPERTS}0.{parts[0]}.{tensor}")
        return found

    def _allocate(self, count: int, window: Window, allocate: Allocate) -> Raw:
        shapes = self._shapes(count, window)
        return {name: {tensor: allocate(*shape) for tensor, shape in of.items()} for name, of in shapes.items()}

    def _fills(self, window: Window, first: int, raw: Raw) -> list[Fill]:
        """What fills `raw`, which holds the window's experts from `first` on."""
        fills = []
        count = len(next(iter(raw["w2"].values())))
        for name, parts in _PARTS.items():
            for tensor, elements in _TENSORS[self.stored].items():
                cut = slice(window.low // (elements or 1), window.high // (elements or 1))
                rows, columns = (slice(window.low, window.high), slice(None)) if name == "w13" else (slice(None), cut)
                for expert, part in np.ndindex(count, len(parts)):
                    place = self.tensors.places[f"{EXPERTS}{first + expert}.{parts[part]}.{tensor}"]
                    target = raw[name][tensor][expert, part, ...] if name == "w13" else raw[name][tensor][expert, ...]
                    fills.append(Fill(place, target, rows, columns) if elements else Fill(place, target))
        return fills

    def _chunks(self, windows: Sequence[Window], memory: Memory) -> Iterator[_Chunk]:
        """Chunks, in order, that cover the windows; those of one window are of about the same size."""
        edges = sorted({edge for window in windows for edge in (window.first, window.last)})
        for start, end in itertools.pairwise(edges):
            within = tuple(number for number, window in enumerate(windows) if window.first <= start < window.last)
            if not within:
                continue
            an_expert = self._chunk_nbytes(_Chunk(0, 1, within), windows)
            a_chunk = max(1, memory.chunk_bytes // an_expert)
            size = -(-(end - start) // -(-(end - start) // a_chunk))
            for first in range(start, end, size):
                yield _Chunk(first, min(first + size, end), within)

    def _chunk_nbytes(self, chunk: _Chunk, windows: Sequence[Window]) -> int:
        return sum(_nbytes(self._shapes(chunk.last - chunk.first, windows[number])) for number in chunk.windows)


def converter(stored: str, dtype: np.dtype, *, packed: bool) -> Convert | None:
    """From experts as stored to MXFP4Array or bfloat16 `[experts, 2, F, L]` and `[experts, L, F]`, on their device.

    None where they already are that. `dtype` is that of plain ones.
    """
    if (stored == "mxfp4" and packed) or (stored == "plain" and dtype == jnp.bfloat16 and not packed):
        return None
    return functools.partial(_converted, stored=stored, packed=packed)


@functools.partial(jax.jit, static_argnames=("stored", "packed"))
def _converted(raw: Mapping[str, Mapping[str, Any]], *, stored: str, packed: bool) -> Ready:
    ready = {}
    for name, tensors in raw.items():
        if stored == "mxfp4":
            weight = MXFP4Array(tensors["weight_packed"], tensors["weight_scale"]).dequantize(jnp.bfloat16)
        elif stored == "nvfp4":
            dequantize = jax.vmap(dequantize_nvfp4)
            dequantize = jax.vmap(dequantize) if name == "w13" else dequantize
            weight = dequantize(*(tensors[tensor] for tensor in _TENSORS["nvfp4"]))
        else:
            weight = tensors["weight"].astype(jnp.bfloat16)
        ready[name] = quantize_mxfp4(weight) if packed else weight
    return ready


def as_stored(raw: Mapping[str, Mapping[str, Any]]) -> Ready:
    """Experts in MXFP4 or bfloat16, on their device, as they are."""
    return {
        name: MXFP4Array(w["weight_packed"], w["weight_scale"]) if "weight_packed" in w else w["weight"]
        for name, w in raw.items()
    }


def _rows_of(raw: Raw, low: int, high: int) -> Raw:
    return {name: {tensor: array[low:high] for tensor, array in of.items()} for name, of in raw.items()}


def _nbytes(shapes: Mapping[str, Mapping[str, tuple[tuple[int, ...], np.dtype]]]) -> int:
    return sum(padded(math.prod(shape) * dtype.itemsize) for of in shapes.values() for shape, dtype in of.values())
