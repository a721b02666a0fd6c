"""A layer's weights from a checkpoint, each read straight to the devices that will hold it."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from k3jax.checkpoint import LayerTensors
from k3jax.checkpoint.buffers import aligned
from k3jax.checkpoint.stream import Fill, fill
from k3jax.checkpoint.tensor_table import MOE
from k3jax.config import K3Config
from k3jax.expert_stream import (
    Collected,
    Convert,
    ExpertReader,
    Memory,
    Ready,
    Window,
    as_stored,
    converter,
)
from k3jax.experts import RECIPES, Weights, gate_and_up_rows
from k3jax.linear import Weight
from k3jax.moe_arrays import AXES, MoEArrays
from k3jax.options import LoadOptions
from k3jax.stored_weights import BF16, bf16_weight
from pallas_kernels import KernelWeights, fp8_block, lay_out, quantize_fp8_block
from sharding import Layout, mesh_axes, partition_spec

Axes = tuple[str | None, ...]
Index = tuple[slice, ...]
Source = Callable[[Index, np.ndarray], Fill | None]
"""Has part of a stored tensor brought to a target: at once, or by the `Fill` that it returns."""


class LayerArrays:
    """The arrays of one layer, where `layout` wants them.

    Args:
        tensors: the layer as stored. options: `host_memory`, `progress` and `allow_inexact`.
    """

    def __init__(self, tensors: LayerTensors, layout: Layout, options: LoadOptions) -> None:
        self._tensors, self._layout, self._options = tensors, layout, options
        self._memory = Memory(max(1, options.host_memory // Memory.depth))
        self._progress = options.progress or (lambda done, total: None)

    def mlp(self, prefix: str, width_axis: str) -> tuple[Weight, Weight]:
        """`gate_up [2, F, D]`, the gate first, and `down [D, F]`."""
        if self._options.dense_weights == "fp8":
            self._require_whole_blocks(self._tensors.shape(f"{prefix}gate_proj")[0], width_axis)
        gate_up = self._stack([f"{prefix}gate_proj", f"{prefix}up_proj"], (None, width_axis, "hidden"))
        return self._dense(gate_up), self._dense(self._matrix(f"{prefix}down_proj", ("hidden", width_axis)))

    def _dense(self, weight: jax.Array) -> Weight:
        return quantize_fp8_block(weight) if self._options.dense_weights == "fp8" else weight

    def _require_whole_blocks(self, width: int, width_axis: str) -> None:
        sizes = self._layout.sizes
        shards = math.prod(getattr(sizes, axis) for axis in getattr(self._layout.rules, width_axis))
        if shards > 1 and width // shards % fp8_block.BLOCK:
            raise NotImplementedError(
                f"dense_weights='fp8': a width of {width} over {shards} devices cuts blocks of {fp8_block.BLOCK} in "
                "two; use dense_weights='bf16', or fewer devices"
            )

    def moe(self, config: K3Config, recipe: str, implementation: str | None) -> MoEArrays:
        """All arrays of a mixture of experts: packed if the recipe's are, in a kernel's layout if it runs here."""
        bias, norm = f"{MOE}gate.e_score_correction_bias", f"{MOE}routed_expert_norm.weight"
        arrays: dict[str, Any] = {"router_weight": self._matrix(f"{MOE}gate", AXES["router_weight"])}
        arrays["router_bias"] = self._vector(self._tensors[bias], AXES["router_bias"])
        if config.routed_expert_hidden_size is not None:
            arrays["latent_down"] = self._dense(self._matrix(f"{MOE}routed_expert_down_proj", AXES["latent_down"]))
            arrays["latent_up"] = self._dense(self._matrix(f"{MOE}routed_expert_up_proj", AXES["latent_up"]))
        if norm in self._tensors:
            arrays["latent_norm"] = self._vector(self._tensors[norm].astype(BF16), AXES["latent_norm"])
        if config.num_shared_experts:
            arrays["shared_gate_up"], arrays["shared_down"] = self.mlp(f"{MOE}shared_experts.", "shared_ff")
        w13, w2 = self._experts(config, recipe, implementation)
        return MoEArrays(**arrays, w13=w13, w2=w2)

    def _sharding(self, axes: Axes) -> NamedSharding | None:
        mesh = self._layout.mesh
        return None if mesh is None else NamedSharding(mesh, partition_spec(axes, self._layout.rules))

    def _vector(self, values: np.ndarray, axes: Axes) -> jax.Array:
        return self._placed([lambda index, target: np.copyto(target, values[index])], values.shape, values.dtype, axes)

    def _matrix(self, stem: str, axes: Axes) -> jax.Array:
        return self._placed([self._source(stem)], self._tensors.shape(stem), BF16, axes)

    def _stack(self, stems: Sequence[str], axes: Axes) -> jax.Array:
        sources = [self._source(stem) for stem in stems]
        return self._placed(sources, (len(stems), *self._tensors.shape(stems[0])), BF16, axes)

    def _source(self, stem: str) -> Source:
        """How to get parts of a weight as bfloat16; only those are read where it is stored so."""
        place = self._tensors.places.get(f"{stem}.weight")
        if place is not None and place.entry.dtype == "BF16":
            return lambda index, target: Fill(place, target, *index)
        weight = functools.cache(lambda: bf16_weight(self._tensors, stem))
        return lambda index, target: np.copyto(target, weight()[index])

    def _placed(self, sources: Sequence[Source], shape: tuple[int, ...], dtype: np.dtype, axes: Axes) -> jax.Array:
        """An array of that shape, each part that a device here holds got from `sources` once.

        The shape has a leading axis for the sources where there are several.
        """
        sharding = self._sharding(axes)
        held: Mapping[Any, Any] = {None: (slice(None),) * len(shape)}
        if sharding is not None:
            held = sharding.addressable_devices_indices_map(shape)
        parts: dict[Index, np.ndarray] = {}
        of_device, fills = [], []
        for device, index in held.items():
            whole = tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True))
            of_device.append((device, whole))
            if whole not in parts:
                parts[whole] = aligned(tuple(part.stop - part.start for part in whole), dtype)
                targets = parts[whole] if len(sources) > 1 else [parts[whole]]
                of_source = whole[1:] if len(sources) > 1 else whole
                fills += [source(of_source, target) for source, target in zip(sources, targets, strict=True)]
        fill([item for item in fills if item is not None])
        if sharding is None:
            return jax.device_put(parts[of_device[0][1]])
        arrays = [jax.device_put(parts[whole], device) for device, whole in of_device]
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)

    def _experts(self, config: K3Config, recipe: str, implementation: str | None) -> tuple[Weights, Weights]:
        num_experts, width, latent = config.num_experts, config.expert_width, config.latent_size
        assert num_experts is not None
        reader = ExpertReader(self._tensors, num_experts, width, latent)
        sharding = self._sharding(AXES["w13"])
        devices: dict[Window, list[jax.Device | None]] = {}
        if sharding is None:
            devices[Window(0, num_experts, 0, width)] = [None]
        else:
            shape = (num_experts, 2, width, latent)
            for device, index in sharding.addressable_devices_indices_map(shape).items():
                assert index is not None
                (first, last, _), (low, high, _) = index[0].indices(num_experts), index[2].indices(width)
                devices.setdefault(Window(first, last, low, high), []).append(device)
        of_windows = [held[0] for held in devices.values()]
        parts = self._windows(reader, list(devices), of_windows, recipe, implementation)
        placed = [(device, part) for held, part in zip(devices.values(), parts, strict=True) for device in held]
        w13, w2 = (self._joined(name, [(device, part[name]) for device, part in placed]) for name in ("w13", "w2"))
        if isinstance(w13, dict):
            ready = as_stored({"w13": w13, "w2": w2})
            w13, w2 = ready["w13"], ready["w2"]
        return w13, w2

    def _windows(
        self,
        reader: ExpertReader,
        windows: list[Window],
        devices: Sequence[jax.Device | None],
        recipe: str,
        implementation: str | None,
    ) -> list[Mapping[str, Any]]:
        """w13 and w2 of each window: as stored and in the host's memory, or as they are wanted and on the device."""
        convert = converter(reader.stored, reader.dtype, packed=RECIPES[recipe].packed)
        platforms = {(device or jax.devices()[0]).platform for device in devices}
        if convert is None and platforms == {"cpu"}:
            return list(reader.read_in_place(windows, self._memory, self._progress))
        results = []
        for window, device in zip(windows, devices, strict=True):
            try:
                layer_out = self._with_layout(convert or as_stored, recipe, implementation)
                results.append(self._collect(reader, window, device, layer_out))
            except _NoKernelLayout:  # MoE says why; what was laid out is read again as it is stored
                results.append(self._collect(reader, window, device, convert or as_stored))
        return results

    def _collect(
        self, reader: ExpertReader, window: Window, device: jax.Device | None, convert: Convert
    ) -> Mapping[str, Any]:
        collected = Collected(convert, window.last - window.first, device)
        reader.read_through(window, self._memory, self._progress, collected.add)
        assert collected.ready is not None
        return collected.ready

    def _with_layout(self, convert: Convert, recipe: str, implementation: str | None) -> Convert:
        """`convert`, and then into the layout of the kernel that will run, where a chunk of experts tells which."""
        if self._layout.mesh is not None or self._options.allow_inexact or not RECIPES[recipe].packed:
            return convert  # a layer over a mesh, or one to be narrowed, is laid out when it is whole
        place = functools.partial(lay_out, recipe=recipe, implementation=implementation)
        products: set[tuple[str, ...]] = set()  # of w13 and w2, the same for all chunks

        def convert_and_lay_out(raw: Mapping[str, Mapping[str, Any]]) -> Ready:
            ready = convert(raw)
            w13, w2 = place(gate_and_up_rows(ready["w13"]), gated=True), place(ready["w2"], gated=False)
            products.add(tuple(w.mma for w in (w13, w2) if isinstance(w, KernelWeights)))
            if len(products) > 1 or len(*products) == 1:
                raise _NoKernelLayout
            return {"w13": w13, "w2": w2} if products != {()} else ready

        return convert_and_lay_out

    def _joined(self, name: str, placed: Sequence[tuple[jax.Device | None, Any]]) -> Any:
        """One array of the whole layer out of what each device holds, for each leaf."""
        sharding = self._sharding(AXES[name])
        if sharding is None:
            return jax.tree.map(jax.device_put, placed[0][1])
        axes = mesh_axes(AXES[name], self._layout.rules)
        shards = [math.prod(sharding.mesh.shape[axis] for axis in of_dimension) for of_dimension in axes]

        def join(*leaves: jax.Array) -> jax.Array:
            whole = tuple(size * count for size, count in zip(leaves[0].shape, shards, strict=True))
            return jax.make_array_from_single_device_arrays(whole, sharding, list(leaves))

        return jax.tree.map(join, *(jax.device_put(part, device) for device, part in placed))


class _NoKernelLayout(Exception):
    """Some experts fit a kernel's layout and others do not."""
