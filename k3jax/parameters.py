"""A layer's parameters carry the logical axes of their dimensions; from these comes where each lies on a mesh."""

from typing import Any

import jax
from flax import nnx

from sharding import AxisRules, Layout, partition_spec

Axes = tuple[str | None, ...]


def place_parameters(layer: nnx.Module, layout: Layout) -> None:
    """Puts every parameter of `layer` where `layout` wants it."""
    for _, variable in nnx.iter_graph(layer):
        if isinstance(variable, nnx.Variable):
            variable.set_value(layout.place(variable.get_value(), _axes(variable)))


def parameter_specs(layer: nnx.Module, rules: AxisRules) -> Any:
    """`layer` with the PartitionSpec of each parameter in its place."""
    return jax.tree.map(lambda variable: partition_spec(_axes(variable), rules), layer, is_leaf=_is_variable)


def _axes(variable: nnx.Variable) -> Axes:
    axes = variable.get_metadata().get("axes")
    if axes is None:
        raise ValueError(f"a {type(variable).__name__} of this layer has no logical axes: give it `axes=`")
    return axes


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)
