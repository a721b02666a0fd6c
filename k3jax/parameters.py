"""A layer's parameters carry the logical axes of their dimensions; from these comes where each lies on a mesh."""

from typing import Any

import jax
from flax import nnx

from pallas_kernels import KernelWeights
from sharding import AxisRules, Layout, partition_spec

Axes = tuple[str | None, ...]


def place_parameters(layer: nnx.Module, layout: Layout) -> None:
    """Puts every parameter of `layer` where `layout` wants it."""
    for _, variable in nnx.iter_graph(layer):
        if isinstance(variable, nnx.Variable):
            value, axes = variable.get_value(), _axes(variable)
            if isinstance(value, KernelWeights):
                leaves = zip(jax.tree.leaves(value), kernel_axes(axes), strict=True)
                placed = [layout.place(leaf, leaf_axes) for leaf, leaf_axes in leaves]
                variable.set_value(jax.tree.unflatten(jax.tree.structure(value), placed))
            else:
                variable.set_value(layout.place(value, axes))


def parameter_specs(layer: nnx.Module, rules: AxisRules) -> Any:
    """`layer` with the PartitionSpec of each parameter, or of its leaves, in its place."""

    def specs(variable: nnx.Variable) -> Any:
        value, axes = variable.get_value(), _axes(variable)
        if not isinstance(value, KernelWeights):
            return partition_spec(axes, rules)
        leaves = [partition_spec(leaf_axes, rules) for leaf_axes in kernel_axes(axes)]
        return variable.replace(jax.tree.unflatten(jax.tree.structure(value), leaves))

    return jax.tree.map(specs, layer, is_leaf=_is_variable)


def kernel_axes(axes: Axes) -> tuple[Axes, Axes]:
    """The logical axes of the words and the exponents of experts `axes` in a kernel's layout."""
    return (axes[0], axes[-2], axes[-1], None), ("expert_part",)


def _axes(variable: nnx.Variable) -> Axes:
    axes = variable.get_metadata().get("axes")
    if axes is None:
        raise ValueError(f"a {type(variable).__name__} of this layer has no logical axes: give it `axes=`")
    return axes


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)
