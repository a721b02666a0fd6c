"""`Layout`: where a layer's parameters and tokens lie on a mesh, and how its body runs on every rank of it.

A layer's body is written for one rank's tokens and parameters. `run` calls it as it is on one device, and inside one
`shard_map` on a mesh: tokens that ranks cannot share evenly are made up to a number that they can, and dropped again.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from sharding.chunks import padded
from sharding.dispatch import WIRES, Ranks, ReplicatedTokens, ShardedTokens
from sharding.mesh import AXES, MeshSizes
from sharding.mlp_tp import mlp_tp
from sharding.rules import AxisRules, layout_rules, local_shape, partition_spec
from sharding.transports import TRANSPORTS, Encode

Specs = Callable[[Any, AxisRules], Any]
"""`specs(layer, rules)`: the PartitionSpec of every parameter, as a prefix of the layer's pytree."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh (None: one device), its rules, and what moves between its ranks. Hashable. Made by `make_layout`."""

    mesh: Mesh | None = None
    rules: AxisRules = dataclasses.field(default_factory=AxisRules)
    ranks: Ranks = dataclasses.field(default_factory=Ranks)

    @property
    def sizes(self) -> MeshSizes:
        """Ranks along each axis."""
        return MeshSizes() if self.mesh is None else mesh_sizes(self.mesh)

    @property
    def token_shards(self) -> int:
        """Into how many parts tokens are split."""
        return math.prod(getattr(self.sizes, axis) for axis in self.rules.tokens)

    def adds_tokens(self, count: int) -> bool:
        """Whether `count` tokens cannot be shared evenly, so that `run` adds some."""
        return self.mesh is not None and (count == 0 or count % self.token_shards > 0)

    def place(self, value: Any, axes: tuple[str | None, ...]) -> Any:
        """A pytree whose leaves have the logical `axes`, split over the mesh; shapes without values stay such.

        Each process gives the devices that it has their parts, of a value that all processes have.
        """
        if self.mesh is None:
            return value
        sharding = NamedSharding(self.mesh, partition_spec(axes, self.rules))
        return jax.tree.map(lambda leaf: _put(leaf, sharding), value)

    def flat(self, array: Array, features: int) -> Array:
        """`[..., *features] -> [T, *features]`, where the last `features` dimensions are not tokens'."""
        lead = array.ndim - features
        shape = (math.prod(array.shape[:lead]), *array.shape[lead:])
        if not self._explicit:
            return array.reshape(shape)
        axes = ("tokens" if shape[0] % self.token_shards == 0 else None, *[None] * features)
        return jax.lax.reshape(array, shape, out_sharding=self._sharding(axes))

    def unflat(self, array: Array, like: Array) -> Array:
        """`[T, D]` in the shape of `like`, and with explicit mesh axes also in its sharding."""
        if not self._explicit:
            return array.reshape(like.shape)
        sharding = jax.typeof(like).sharding
        if sharding.mesh.empty:
            sharding = self._sharding(())
        return jax.lax.reshape(array, like.shape, out_sharding=sharding)

    def run(self, body: Callable[..., Any], specs: Specs, layer: Any, *tokens: Any) -> Any:
        """`body(layer, *tokens)`, whose results also begin with an axis of tokens, on every rank's own part.

        Tokens that are added hold zeros, False, and -1 in integer arrays.
        """
        if self.mesh is None:
            return body(layer, *tokens)
        return _run_over_mesh(self, body, specs, layer, tokens)

    @property
    def _explicit(self) -> bool:
        return self.mesh is not None and _is_explicit(self.mesh)

    def _sharding(self, axes: tuple[str | None, ...]) -> NamedSharding:
        assert self.mesh is not None
        return NamedSharding(self.mesh, partition_spec(axes, self.rules))


@dataclasses.dataclass(frozen=True)
class Travel:
    """How rows and sums travel between ranks.

    Attributes:
        wire: the format of partial sums that ranks add up, "f32" or "bf16".
        transport: of sharded tokens, "all_gather" (None) or "per_rank"; see `choose_transport`.
        encode: of rows on their way to the experts where tokens are sharded; None for bfloat16.

    Raises:
        ValueError: a name is unknown.
    """

    wire: str = "f32"
    transport: str | None = None
    encode: Encode | None = None

    def __post_init__(self) -> None:
        if self.wire not in WIRES:
            raise ValueError(f"wire={self.wire!r} is not one of {', '.join(WIRES)}")
        if self.transport is not None and self.transport not in TRANSPORTS:
            raise ValueError(f"transport={self.transport!r} is not one of {', '.join(TRANSPORTS)}, nor None")


_AS_IT_IS = Travel()


def make_layout(mesh: Mesh | None, tokens: str, travel: Travel = _AS_IT_IS, *, split_shared: bool = False) -> Layout:
    """The layout of MoE layers over `mesh`; None is for one device.

    Raises:
        ValueError: the mesh has other axes, an option is unknown, or one is given that means nothing here.
    """
    rules = _checked_rules(mesh, tokens, split_shared, travel)
    if mesh is None:
        return Layout()
    expert, width, shared = (_split(mesh, axes) for axes in (rules.expert, rules.expert_ff, rules.shared_ff))
    if tokens == "replicated":
        return Layout(mesh, rules, ReplicatedTokens(width, shared, travel.wire, experts=expert))
    transport = None
    if expert:
        transport = TRANSPORTS[travel.transport or "all_gather"](expert, mesh_sizes(mesh).expert)
    gathered = tuple(axis for axis in shared if axis in rules.tokens)
    ranks = ShardedTokens(width, shared, travel.wire, transport=transport, gathered=gathered, encode=travel.encode)
    return Layout(mesh, rules, ranks)


def make_mlp_layout(
    width: int,
    mesh: Mesh | None,
    tokens: str,
    travel: Travel,
    *,
    split_shared: bool = False,
    gpus_per_node: int = 8,
) -> Layout:
    """The layout of dense layers whose MLP is `width` wide.

    With replicated tokens `mlp_tp` says over how many ranks it is split. No axis may have that many: then the same
    devices get another mesh, whose axis `tensor` has, and whose axis `expert` counts the copies.

    Raises:
        ValueError: the mesh has other axes, an option is unknown, or the width cannot be split evenly.
        NotImplementedError: another mesh is needed, and this one's axes are explicit.
    """
    rules = _checked_rules(mesh, tokens, split_shared, travel)
    if mesh is None:
        return Layout()
    sizes = mesh_sizes(mesh)
    if tokens == "replicated":
        ranks = sizes.expert * sizes.tensor
        shards = mlp_tp(False, ranks, gpus_per_node, width)
        if shards == 1:
            rules = dataclasses.replace(rules, mlp_ff=())
        elif shards < ranks:
            mesh, rules = _mesh_of_copies(mesh, shards), dataclasses.replace(rules, mlp_ff=("tensor",))
    local_shape((width,), ("mlp_ff",), mesh_sizes(mesh), rules)
    split = _split(mesh, rules.mlp_ff)
    if tokens == "replicated":
        return Layout(mesh, rules, ReplicatedTokens((), split, travel.wire, experts=()))
    gathered = tuple(axis for axis in split if axis in rules.tokens)
    return Layout(mesh, rules, ShardedTokens((), split, travel.wire, transport=None, gathered=gathered))


def _checked_rules(mesh: Mesh | None, tokens: str, split_shared: bool, travel: Travel) -> AxisRules:
    rules = layout_rules(tokens, split_shared)
    if mesh is None and tokens == "sharded":
        raise ValueError("tokens='sharded' needs a mesh: pass mesh=sharding.make_mesh(...)")
    if mesh is not None and set(mesh.axis_names) != set(AXES):
        raise ValueError(
            f"the mesh has axes {', '.join(map(str, mesh.axis_names))}, not {', '.join(AXES)}: "
            "sharding.make_mesh(data=, expert=, tensor=) makes one"
        )
    if travel.transport is not None and tokens == "replicated":
        raise ValueError(f"transport={travel.transport!r} is for tokens='sharded'; replicated tokens do not travel")
    return rules


def _split(mesh: Mesh, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `axes` that have more than one rank."""
    return tuple(axis for axis in axes if mesh.shape[axis] > 1)


def _mesh_of_copies(mesh: Mesh, shards: int) -> Mesh:
    """The devices as data x copies x shards: of the ranks that share tokens, rank r holds shard `r % shards`."""
    if _is_explicit(mesh):
        raise NotImplementedError(
            f"this MLP's width can be split over {shards} ranks, a part of an axis, which explicit mesh axes cannot "
            "express; use AxisType.Auto axes, or LoadOptions(gpus_per_node=1) for a whole copy on every rank"
        )
    devices = mesh.devices.transpose([mesh.axis_names.index(axis) for axis in AXES])
    return Mesh(devices.reshape(devices.shape[0], -1, shards), AXES)


def _is_explicit(mesh: Mesh) -> bool:
    return AxisType.Explicit in mesh.axis_types


def mesh_sizes(mesh: Mesh) -> MeshSizes:
    """The sizes of the three axes that layers use."""
    return MeshSizes(**{axis: mesh.shape[axis] for axis in AXES})


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run_over_mesh(layout: Layout, body: Callable[..., Any], specs: Specs, layer: Any, tokens: tuple[Any, ...]) -> Any:
    assert layout.mesh is not None
    count = jax.tree.leaves(tokens)[0].shape[0]
    padded_count = max(-(-count // layout.token_shards), 1) * layout.token_shards
    token_spec = partition_spec(("tokens",), layout.rules)
    in_specs = (specs(layer, layout.rules), *(token_spec for _ in tokens))
    arguments = (layer, *jax.tree.map(lambda array: padded(array, padded_count), tokens))
    if layout._explicit:
        arguments = jax.tree.map(functools.partial(_reshard, layout.mesh), in_specs, arguments, is_leaf=_is_spec)
    results = jax.shard_map(
        body,
        mesh=layout.mesh,
        in_specs=in_specs,
        out_specs=token_spec,
        check_vma=False,  # kernels' loops and custom derivatives do not say which values differ between ranks
    )(*arguments)
    if padded_count == count:
        return results
    if layout._explicit:  # whose axes could not split that number of tokens
        results = _reshard(layout.mesh, PartitionSpec(), results)
    return jax.tree.map(lambda array: array[:count], results)


def _reshard(mesh: Mesh, spec: PartitionSpec, value: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, NamedSharding(mesh, spec)), value)


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)


def _put(leaf: Any, sharding: NamedSharding) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    is_global = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    if is_global or sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    host = np.asarray(leaf)
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: host[index])
