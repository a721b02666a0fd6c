"""The mesh that layers run on: axes `data` (attention data parallel), `expert` and `tensor`."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np

AXES = ("data", "expert", "tensor")


@dataclasses.dataclass(frozen=True)
class MeshSizes:
    """Devices along each mesh axis; enough to plan a layout without having the devices.

    Raises:
        ValueError: a size is not a positive integer.
    """

    data: int = 1
    expert: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"mesh: {axis}={size!r} must be a positive integer")

    @property
    def devices(self) -> int:
        """How many devices the mesh has."""
        return self.data * self.expert * self.tensor


def parse_mesh(text: str) -> MeshSizes:
    """`"expert=8,tensor=2"` -> `MeshSizes(expert=8, tensor=2)`; an axis that is left out has size 1.

    Raises:
        ValueError: an axis is unknown or named twice, or a size is not a positive integer.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        axis, _, size = part.partition("=")
        if axis not in AXES or not size.isascii() or not size.isdecimal():
            raise ValueError(f"mesh {text!r}: {part!r} must be AXIS=SIZE with an axis of {', '.join(AXES)}")
        if axis in sizes:
            raise ValueError(f"mesh {text!r}: axis {axis!r} is named twice")
        sizes[axis] = int(size)
    return MeshSizes(**sizes)


def make_mesh(
    data: int = 1, expert: int = 1, tensor: int = 1, *, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """A mesh of `data x expert x tensor` devices, the first ones of `devices` (all of JAX's when None).

    Raises:
        ValueError: a size is not a positive integer, or there are not that many devices.
    """
    sizes = MeshSizes(data, expert, tensor)
    available = list(jax.devices() if devices is None else devices)
    if sizes.devices > len(available):
        raise ValueError(
            f"mesh {data=}, {expert=}, {tensor=} needs {sizes.devices} devices; there are {len(available)}; "
            "make an axis smaller, or start JAX on more"
        )
    shape = (data, expert, tensor)
    return jax.sharding.Mesh(np.array(available[: math.prod(shape)]).reshape(shape), AXES)
