"""Meshes, how parameters and tokens lie on them, and what moves between ranks. Knows no experts' mathematics."""

from sharding.chunks import in_chunks
from sharding.dispatch import Arrived, Ranks
from sharding.layout import Layout, Travel, make_layout, make_mlp_layout, mesh_sizes
from sharding.mesh import AXES, MeshSizes, make_mesh, parse_mesh
from sharding.rules import AxisRules, layout_rules, local_shape, mesh_axes, partition_spec
from sharding.transports import choose_transport

__all__ = [
    "AXES",
    "Arrived",
    "AxisRules",
    "Layout",
    "MeshSizes",
    "Ranks",
    "Travel",
    "choose_transport",
    "in_chunks",
    "layout_rules",
    "local_shape",
    "make_layout",
    "make_mesh",
    "make_mlp_layout",
    "mesh_axes",
    "mesh_sizes",
    "parse_mesh",
    "partition_spec",
]
