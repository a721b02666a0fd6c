"""Gives a layer's experts the layout of the kernel that will run them; on a mesh, each device the part it holds."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax.experts import FrozenExperts, Weights, gate_and_up_rows
from k3jax.parameters import Axes, kernel_axes
from pallas_kernels import KernelWeights, MXFP4Array, from_kernel_layout, to_kernel_layout
from sharding import Layout, local_shape, mesh_axes, partition_spec

Place = Callable[..., Weights]
"""`lay_out` with all but the weights, `gated` and `first_expert` given."""
OfPart = Callable[[MXFP4Array, int], KernelWeights | None]
"""Lays out one device's part, whose first expert is given; None if that cannot be done."""

_AT_A_TIME = 128 << 20  # bytes of a layout that become another


def lay_out_experts(w13: FrozenExperts, w2: FrozenExperts, layout: Layout, place: Place) -> None:
    """Puts what `place` makes of both into them. On a mesh every device lays out its own part, or none does.

    Raises:
        NotImplementedError: `place` raises it.
    """
    for experts, gated in ((w13, True), (w2, False)):
        w = experts.get_value()
        if not isinstance(w, MXFP4Array):
            place(w, gated=gated)
            continue
        rows = gate_and_up_rows if gated else _as_it_is
        of_part = functools.partial(_laid_out, rows, functools.partial(place, gated=gated))
        axes = experts.get_metadata()["axes"]
        laid_out = of_part(w) if layout.mesh is None else _on_mesh(w, layout, axes, of_part)
        if laid_out is not None:
            experts.set_value(laid_out)


def stored_expert(w: Weights, expert: int) -> Any:
    """One expert as checkpoints have it, packed or plain: `[2, F, L]` of w13, `[L, F]` of w2."""
    if not isinstance(w, KernelWeights):
        return jax.tree.map(lambda leaf: leaf[expert], w)
    parts = w.exponents.size // w.shape[0]  # laid out by as many ranks, each with exponents of its own
    exponents = w.exponents.reshape(parts, -1)[:, expert]
    words = jnp.split(w.words[expert : expert + 1], parts, axis=1 if w.gated else 2)
    found = []
    for part, exponent in zip(words, exponents, strict=True):
        matrix = from_kernel_layout(KernelWeights(part, exponent[None], w.mma, w.gated))[0]
        found.append(jax.tree.map(lambda leaf: leaf.reshape(2, -1, leaf.shape[-1]), matrix) if w.gated else matrix)
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=-2 if w.gated else -1), *found)


def _as_it_is(w: MXFP4Array) -> MXFP4Array:
    return w


def _laid_out(rows: Callable[[Any], Any], place: Place, w: MXFP4Array, first_expert: int = 0) -> KernelWeights | None:
    # First of shapes alone: `rows` copies, and mostly no kernel wants them.
    laid_out = place(jax.eval_shape(rows, w), first_expert=first_expert)
    if isinstance(laid_out, KernelWeights) and not _is_abstract(w):
        laid_out = place(rows(w), first_expert=first_expert)
    return laid_out if isinstance(laid_out, KernelWeights) else None


def _on_mesh(w: MXFP4Array, layout: Layout, axes: Axes, of_part: OfPart) -> KernelWeights | None:
    """Every device's part laid out; None if that cannot be done for all, in this process or in another."""
    assert layout.mesh is not None
    parts, laid_out = _parts(w, layout, axes), []
    for first_expert, part in parts:
        found = of_part(part, first_expert)
        if found is None:
            break
        laid_out.append(found)
    if not everywhere(len(laid_out) == len(parts), layout.mesh):
        return None
    return joined(multiply_alike(laid_out, layout.mesh), layout, axes)


def multiply_alike(parts: list[KernelWeights], mesh: Mesh | None) -> list[KernelWeights]:
    """What devices of this process hold of the same experts, for e4m3 products if all devices of the mesh have that.

    What is laid out again replaces its part in the list.
    """
    if not everywhere(all(part.mma == "e4m3" for part in parts), mesh):
        for number, part in enumerate(parts):
            parts[number] = for_bfloat16_products(part)
    return parts


def for_bfloat16_products(w: KernelWeights) -> KernelWeights:
    """The same weights, exactly, a few experts at a time and in the memory of `w`, which is no longer valid."""
    if w.mma == "bf16":
        return w
    words, exponents = w.words, w.exponents
    step = max(1, _AT_A_TIME // (words.nbytes // len(words)))
    for first in range(0, len(words), step):
        some = slice(first, first + step)
        part = from_kernel_layout(KernelWeights(words[some], exponents[some], w.mma, w.gated))
        again = to_kernel_layout(part, recipe="w4a16", gated=w.gated)
        words, exponents = put_experts((words, exponents), (again.words, again.exponents), jnp.int32(first))
    return KernelWeights(words, exponents, "bf16", w.gated)


@functools.partial(jax.jit, donate_argnums=0)
def put_experts[T](whole: T, part: T, first: jax.Array) -> T:
    """`whole`, whose memory it takes, with the experts of `part` from number `first` on; pytrees of arrays."""
    return jax.tree.map(lambda all, some: jax.lax.dynamic_update_slice_in_dim(all, some, first, 0), whole, part)


def _parts(w: MXFP4Array, layout: Layout, axes: Axes) -> Sequence[tuple[int, MXFP4Array]]:
    """The first expert and the weights that each device of this process holds; of shapes without values, any's."""
    if not _is_abstract(w):
        shards = zip(w.codes.addressable_shards, w.scales.addressable_shards, strict=True)
        return [(codes.index[0].start or 0, MXFP4Array(codes.data, scales.data)) for codes, scales in shards]
    part = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(local_shape(leaf.shape, axes, layout.sizes, layout.rules), leaf.dtype), w
    )
    return [(0, part)]


def joined(parts: Sequence[KernelWeights], layout: Layout, axes: Axes) -> KernelWeights:
    """The whole experts of logical `axes`, of what each of this process's devices holds; one part without a mesh."""
    if layout.mesh is None:
        return parts[0]
    by_leaf = zip(*(jax.tree.leaves(part) for part in parts), strict=True)
    leaves = [joined_leaf(leaf, layout, of) for leaf, of in zip(by_leaf, kernel_axes(axes), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(parts[0]), leaves)


def joined_leaf(parts: Sequence[Any], layout: Layout, axes: Axes) -> Any:
    """One global array of what this process's devices hold, in any order."""
    assert layout.mesh is not None
    sharding = NamedSharding(layout.mesh, partition_spec(axes, layout.rules))
    shards = [math.prod(getattr(layout.sizes, axis) for axis in split) for split in mesh_axes(axes, layout.rules)]
    shape = tuple(size * count for size, count in zip(parts[0].shape, shards, strict=True))
    if isinstance(parts[0], jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, parts[0].dtype, sharding=sharding)
    return jax.make_array_from_single_device_arrays(shape, sharding, list(parts))


def everywhere(here: bool, mesh: Mesh | None) -> bool:
    """Whether `here` is True in every process that has devices of the mesh."""
    if mesh is None or not mesh.is_multi_process:
        return here
    flags = jax.make_array_from_callback(
        (mesh.size,), NamedSharding(mesh, PartitionSpec(mesh.axis_names)), lambda index: np.array([here])
    )
    return bool(jax.jit(jnp.all, out_shardings=NamedSharding(mesh, PartitionSpec()))(flags))


def _is_abstract(w: MXFP4Array) -> bool:
    return isinstance(w.codes, jax.ShapeDtypeStruct)
