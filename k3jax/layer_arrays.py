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
from k3jax.expert_arrays import ExpertArrays
from k3jax.expert_stream import ExpertReader, Memory, Progress
from k3jax.kernel_placement import Place
from k3jax.linear import Weight
from k3jax.moe_arrays import MoEArrays
from k3jax.moe_shapes import AXES
from k3jax.options import LoadOptions
from k3jax.stored_weights import BF16, bf16_weight
from pallas_kernels import fp8_block, quantize_fp8_block
from sharding import Layout, partition_spec

Axes = tuple[str | None, ...]
Index = tuple[slice, ...]
Source = Callable[[Index, np.ndarray], Fill | None]
"""Has part of a stored tensor brought to a target: at once, or by the `Fill` that it returns."""


class LayerArrays:
    """The arrays of one layer, where `layout` wants them.

    Args:
        tensors: the layer as stored. options: `host_memory` and `dense_weights`.
        progress: told how many bytes of the experts are read, and how many are to be.
    """

    def __init__(self, tensors: LayerTensors, layout: Layout, options: LoadOptions, progress: Progress) -> None:
        self._tensors, self._layout, self._options, self._progress = tensors, layout, options, progress
        self._memory = Memory(max(1, options.host_memory // Memory.depth))

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

    def moe(self, config: K3Config, *, packed: bool, place: Place | None) -> MoEArrays:
        """All arrays of a mixture of experts, which are in MXFP4 if `packed`, and then laid out by `place`."""
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
        assert config.num_experts is not None
        reader = ExpertReader(self._tensors, config.num_experts, config.expert_width, config.latent_size)
        experts = ExpertArrays(reader, self._layout, self._memory, self._progress)
        w13, w2 = experts.load(packed=packed, place=place)
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
