"""Routed experts from a checkpoint's files to devices: in chunks, read ahead, each byte once.

Where a device shares memory with the host and wants the bytes as they are stored, they are read straight to their final
place. Elsewhere a chunk of experts is read to a buffer, copied to the device, converted and re-laid out there, and put
among the others; at most `depth` chunks of `chunk_bytes` are in host memory at a time.
"""

import dataclasses
import functools
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

        def job(first: int, last: int) -> int:
            fills: list[Fill] = []
            for window, raw in zip(windows, results, strict=True):
                low, high = max(first, window.first), min(last, window.last)
                if low < high:
                    fills += self._fills(window, low, _rows_of(raw, low - window.first, high - window.first))
            fill(fills)
            return sum(item.target.nbytes for item in fills)

        total = sum(array.nbytes for raw in results for of_part in raw.values() for array in of_part.values())
        _run(job, self._chunks(windows, memory), memory, total, progress)
        return results

    def read_through(
        self,
        window: Window,
        memory: Memory,
        progress: Progress,
        use: Callable[[int, Raw], None],
    ) -> None:
        """Calls `use(first, raw)` with chunk after chunk of the window; `raw` is to be left alone when that returns."""
        chunks = list(self._chunks([window], memory))
        size = max(_nbytes(self._shapes(last - first, window)) for first, last in chunks)
        free = [np.empty(size + ALIGNMENT, np.uint8) for _ in range(min(memory.depth, len(chunks)))]
        total, done = _nbytes(self._shapes(window.last - window.first, window)), 0

        def jobs() -> Iterator[Callable[[], tuple[int, Raw, np.ndarray]]]:
            for first, last in chunks:
                yield functools.partial(job, first, last, free.pop())

        def job(first: int, last: int, buffer: np.ndarray) -> tuple[int, Raw, np.ndarray]:
            raw = self._allocate(last - first, window, carver(buffer))
            fill(self._fills(window, first, raw))
            return first, raw, buffer

        for first, raw, buffer in ahead(jobs(), len(free)):
            use(first - window.first, raw)
            done += sum(array.nbytes for of_part in raw.values() for array in of_part.values())
            free.append(buffer)
            progress(done, total)

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

    def _chunks(self, windows: Sequence[Window], memory: Memory) -> Iterator[tuple[int, int]]:
        """Ranges of experts, in order, that cover the windows in chunks of about the same size."""
        wanted = [e for e in range(self.num_experts) if any(window.first <= e < window.last for window in windows)]
        widest = max((window.high - window.low for window in windows), default=0)
        whole = Window(0, 1, 0, self.width) if len(windows) > 1 else Window(0, 1, 0, widest)
        a_chunk = max(1, memory.chunk_bytes // _nbytes(self._shapes(1, whole)))
        for run in _runs(wanted):
            size = -(-len(run) // -(-len(run) // a_chunk))
            for start in range(0, len(run), size):
                yield run[start], run[min(start + size, len(run)) - 1] + 1


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


class Collected:
    """Chunks of experts, converted on `device` (None: the default one) and put together there."""

    def __init__(self, convert: Convert, count: int, device: jax.Device | None) -> None:
        self._convert, self._count, self._device = convert, count, device
        self.ready: Ready | None = None

    def add(self, first: int, raw: Raw) -> None:
        """Takes experts `first` and following; when it returns, `raw` is no longer needed."""
        part = self._convert(jax.device_put(raw, self._device))
        if jax.tree.leaves(part)[0].shape[0] == self._count:
            self.ready = jax.block_until_ready(part)
            return
        if self.ready is None:
            with jax.default_device(self._device):
                self.ready = jax.tree.map(lambda leaf: jnp.zeros((self._count, *leaf.shape[1:]), leaf.dtype), part)
        self.ready = _put(self.ready, part, jnp.int32(first))
        jax.block_until_ready(self.ready)


@functools.partial(jax.jit, donate_argnums=0)
def _put(whole: Ready, part: Ready, first: jax.Array) -> Ready:
    def put(whole: jax.Array, part: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(whole, part, first, 0)

    return jax.tree.map(put, whole, part)


def _run(
    job: Callable[[int, int], int], chunks: Iterator[tuple[int, int]], memory: Memory, total: int, progress: Progress
) -> None:
    done = 0
    for size in ahead((functools.partial(job, *chunk) for chunk in chunks), memory.depth):
        done += size
        progress(done, total)


def _rows_of(raw: Raw, low: int, high: int) -> Raw:
    return {name: {tensor: array[low:high] for tensor, array in of.items()} for name, of in raw.items()}


def _nbytes(shapes: Mapping[str, Mapping[str, tuple[tuple[int, ...], np.dtype]]]) -> int:
    return sum(padded(math.prod(shape) * dtype.itemsize) for of in shapes.values() for shape, dtype in of.values())


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """Consecutive numbers together."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs
