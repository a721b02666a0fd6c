"""A layer's routed experts on the devices that hold them, as they are stored or in the layout of a kernel.

What a device holds is put together there out of chunks, each converted and laid out on its own: beside the layer
itself, the host has the chunks that are read ahead, and a device one, before and after it is laid out. Experts are in a
kernel's layout if all of them can be, on every device of a mesh.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from k3jax.expert_stream import Convert, ExpertReader, Memory, Progress, Raw, Ready, Window, as_stored, converter
from k3jax.experts import Weights, gate_and_up_rows
from k3jax.kernel_placement import (
    Place,
    everywhere,
    for_bfloat16_products,
    joined,
    joined_leaf,
    multiply_alike,
    put_experts,
)
from k3jax.moe_shapes import AXES
from pallas_kernels import KernelWeights, MXFP4Array
from sharding import Layout, partition_spec

Devices = Sequence[jax.Device | None]
"""Those that hold the same; None is the default one."""


class ExpertArrays:
    """w13 and w2 of one layer, where `layout` wants them.

    Args:
        memory: how much of the host's may be used. progress: told of the bytes.
    """

    def __init__(self, reader: ExpertReader, layout: Layout, memory: Memory, progress: Progress) -> None:
        self._reader, self._layout, self._memory, self._progress = reader, layout, memory, progress
        self._devices = _devices_of_windows(reader, layout)
        self._windows = list(self._devices)

    def load(self, *, packed: bool, place: Place | None) -> tuple[Weights, Weights]:
        """In MXFP4 if `packed`, laid out by `place` where that gives a kernel's layout of both; else in bfloat16.

        Raises:
            NotImplementedError: `place` raises it, before anything is read if it is for the weights' shapes.
        """
        convert = converter(self._reader.stored, self._reader.dtype, packed=packed)
        if packed and place is not None and self._fits(place):
            laid_out = self._laid_out(convert or as_stored, place)
            if laid_out is not None:
                return laid_out
        if convert is None and self._on_cpu():
            raws = self._reader.read_in_place(self._windows, self._memory, self._progress)
            return self._spread(raws, as_stored)
        return self._spread(self._collected(convert or as_stored, None), lambda ready: ready)

    def _fits(self, place: Place) -> bool:
        """Whether a kernel's layout is wanted of weights of these shapes."""
        window = self._windows[0]
        count, width, latent = window.last - window.first, window.high - window.low, self._reader.latent
        laid_out = (
            place(_abstract(count, 2 * width, latent), gated=True, first_expert=window.first),
            place(_abstract(count, latent, width), gated=False, first_expert=window.first),
        )
        return all(isinstance(w, KernelWeights) for w in laid_out)

    def _laid_out(self, convert: Convert, place: Place) -> tuple[Weights, Weights] | None:
        """None if some experts cannot be, here or in another process: all are then to be read again, as stored."""
        mesh, parts = self._layout.mesh, None
        with contextlib.suppress(_NoKernelLayout):
            parts = self._collected(convert, place)
        if not everywhere(parts is not None, mesh) or parts is None:
            return None
        w13, w2 = (multiply_alike([part.pop(name) for part in parts], mesh) for name in ("w13", "w2"))
        return self._joined_layout("w13", w13), self._joined_layout("w2", w2)

    def _collected(self, convert: Convert, place: Place | None) -> list[Ready]:
        """Each window's experts, on the first of its devices."""
        collected = [_Collected(convert, place, window, held[0]) for window, held in self._devices.items()]

        def use(number: int, first: int, raw: Raw) -> None:
            collected[number].add(first, raw)

        self._reader.read_through(self._windows, self._memory, self._progress, use)
        return [part.ready for part in collected]

    def _joined_layout(self, name: str, of_windows: Sequence[KernelWeights]) -> KernelWeights:
        held = zip(self._devices.values(), of_windows, strict=True)
        parts = [jax.device_put(part, device) for devices, part in held for device in devices]
        return joined(parts, self._layout, AXES[name])

    def _spread(self, of_windows: Sequence[Any], finish: Callable[[Any], Ready]) -> tuple[Weights, Weights]:
        """What windows hold, on each of their devices, as arrays of the whole layer."""
        held = zip(self._devices.values(), of_windows, strict=True)
        parts = [finish(jax.device_put(part, device)) for devices, part in held for device in devices]
        return self._joined("w13", parts), self._joined("w2", parts)

    def _joined(self, name: str, parts: Sequence[Ready]) -> Weights:
        if self._layout.mesh is None:
            return parts[0][name]
        join = functools.partial(joined_leaf, layout=self._layout, axes=AXES[name])
        return jax.tree.map(lambda *leaves: join(leaves), *(part[name] for part in parts))

    def _on_cpu(self) -> bool:
        devices = (device or jax.devices()[0] for held in self._devices.values() for device in held)
        return all(device.platform == "cpu" for device in devices)


class _NoKernelLayout(Exception):
    """Some experts do not fit the kernel's layout."""


class _Collected:
    """A window's experts, put together on `device` chunk by chunk."""

    def __init__(self, convert: Convert, place: Place | None, window: Window, device: jax.Device | None) -> None:
        self._convert, self._place, self._window, self._device = convert, place, window, device
        self._ready: Ready | None = None

    @property
    def ready(self) -> Ready:
        """w13 and w2, when every chunk is in."""
        assert self._ready is not None
        return self._ready

    def add(self, first: int, raw: Raw) -> None:
        """Takes the experts from number `first` on; when it returns, `raw` is no longer needed."""
        part = self._convert(jax.device_put(raw, self._device))
        if self._place is not None:
            part = _laid_out(part, self._place, first)
        count = self._window.last - self._window.first
        if jax.tree.leaves(part)[0].shape[0] == count:
            self._ready = jax.block_until_ready(part)
            return
        if self._ready is None:
            with jax.default_device(self._device):
                self._ready = jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape[1:]), leaf.dtype), part)
        elif self._place is not None:
            _multiply_alike(self._ready, part)
        self._ready = put_experts(self._ready, part, jnp.int32(first - self._window.first))
        jax.block_until_ready(self._ready)


def _laid_out(part: Ready, place: Place, first_expert: int) -> Ready:
    laid_out = {
        "w13": place(gate_and_up_rows(part["w13"]), gated=True, first_expert=first_expert),
        "w2": place(part["w2"], gated=False, first_expert=first_expert),
    }
    if not all(isinstance(w, KernelWeights) for w in laid_out.values()):
        raise _NoKernelLayout
    return laid_out


def _multiply_alike(some: Ready, others: Ready) -> None:
    """Makes layouts for the same products of both, in place."""
    for name in some:
        if some[name].mma != others[name].mma:
            some[name], others[name] = for_bfloat16_products(some[name]), for_bfloat16_products(others[name])


def _devices_of_windows(reader: ExpertReader, layout: Layout) -> Mapping[Window, Devices]:
    """What this process's devices hold of the experts."""
    num_experts, width = reader.num_experts, reader.width
    if layout.mesh is None:
        return {Window(0, num_experts, 0, width): [None]}
    sharding = NamedSharding(layout.mesh, partition_spec(AXES["w13"], layout.rules))
    found: dict[Window, list[jax.Device | None]] = {}
    for device, index in sharding.addressable_devices_indices_map((num_experts, 2, width, reader.latent)).items():
        assert index is not None
        (first, last, _), (low, high, _) = index[0].indices(num_experts), index[2].indices(width)
        found.setdefault(Window(first, last, low, high), []).append(device)
    return found


def _abstract(groups: int, n: int, k: int) -> Any:
    """`[groups, n, k]` in MXFP4, of shapes alone."""
    return jax.eval_shape(
        lambda: MXFP4Array(jnp.zeros((groups, n, k // 2), jnp.uint8), jnp.zeros((groups, n, k // 32), jnp.uint8))
    )
