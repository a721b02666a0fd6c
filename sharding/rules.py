"""Which mesh axes split which logical axis of a parameter or of tokens. Model code names logical axes only."""

import dataclasses
import math

from jax.sharding import PartitionSpec

from sharding.mesh import AXES, MeshSizes

TOKEN_LAYOUTS = ("replicated", "sharded")


@dataclasses.dataclass(frozen=True)
class AxisRules:
    """The mesh axes over which each logical axis is split; an empty tuple replicates it.

    Attributes:
        tokens: the rows that layers are called with. Groups along `data` never exchange anything.
        expert: routed experts, contiguous ranges a rank.
        expert_ff: F of the routed experts.
        expert_part: one entry for every rank's part of every expert: those of the first rank along `tensor` first.
        shared_ff: the shared experts' width, over both axes together: split over one only, each rank of the other
            would add the same whole output again.
        mlp_ff: the width of a dense layer's MLP.
        hidden, latent: D and L, always whole.
    """

    tokens: tuple[str, ...] = ("data",)
    expert: tuple[str, ...] = ("expert",)
    expert_ff: tuple[str, ...] = ("tensor",)
    expert_part: tuple[str, ...] = ("tensor", "expert")
    shared_ff: tuple[str, ...] = ("expert", "tensor")
    mlp_ff: tuple[str, ...] = ("expert", "tensor")
    hidden: tuple[str, ...] = ()
    latent: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            for axis in getattr(self, field.name):
                if axis not in AXES:
                    raise ValueError(f"AxisRules: {field.name} names {axis!r}; mesh axes are {', '.join(AXES)}")


def layout_rules(tokens: str, split_shared: bool = False) -> AxisRules:
    """The rules for tokens "replicated", alike on all ranks of `expert` and `tensor`, or "sharded" over `expert`.

    Where tokens are sharded, shared experts and dense layers are whole on every rank unless `split_shared`.

    Raises:
        ValueError: the layout is unknown, or `split_shared` is asked for where they are always split.
    """
    if tokens not in TOKEN_LAYOUTS:
        raise ValueError(f"{tokens=} is not one of {', '.join(TOKEN_LAYOUTS)}")
    if tokens == "replicated":
        if split_shared:
            raise ValueError("split_shared=True is for tokens='sharded'; replicated tokens always split shared experts")
        return AxisRules()
    spread = AxisRules(tokens=("data", "expert"))
    return spread if split_shared else dataclasses.replace(spread, shared_ff=(), mlp_ff=())


def mesh_axes(logical_axes: tuple[str | None, ...], rules: AxisRules) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each dimension, for its logical axis (None: replicated).

    Raises:
        ValueError: a logical axis is unknown, or two dimensions would be split over the same mesh axis.
    """
    known = {field.name for field in dataclasses.fields(rules)}
    for name in logical_axes:
        if name is not None and name not in known:
            raise ValueError(f"logical axis {name!r} is unknown; the rules have {', '.join(sorted(known))}")
    axes = tuple(() if name is None else getattr(rules, name) for name in logical_axes)
    used = [axis for dimension in axes for axis in dimension]
    for axis in used:
        if used.count(axis) > 1:
            raise ValueError(f"logical axes {logical_axes} collide: more than one is split over mesh axis {axis!r}")
    return axes


def partition_spec(logical_axes: tuple[str | None, ...], rules: AxisRules) -> PartitionSpec:
    """`mesh_axes` as JAX wants it; raises what that raises."""
    return PartitionSpec(*(axes or None for axes in mesh_axes(logical_axes, rules)))


def local_shape(
    shape: tuple[int, ...], logical_axes: tuple[str | None, ...], sizes: MeshSizes, rules: AxisRules | None = None
) -> tuple[int, ...]:
    """One device's part of an array of `shape`.

    Raises:
        ValueError: the axes collide, or a dimension cannot be split evenly.
    """
    if len(shape) != len(logical_axes):
        raise ValueError(f"shape {shape} and logical axes {logical_axes} have different lengths")
    local = []
    for size, name, axes in zip(shape, logical_axes, mesh_axes(logical_axes, rules or AxisRules()), strict=True):
        parts = math.prod(getattr(sizes, axis) for axis in axes)
        if size % parts:
            raise ValueError(
                f"{name} of size {size} cannot be split evenly over {parts} devices ({' x '.join(axes)}); "
                f"make their product a divisor of it, such as {max(n for n in range(1, parts) if size % n == 0)}"
            )
        local.append(size // parts)
    return tuple(local)
