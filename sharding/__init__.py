"""Meshes, and how parameters are laid out on them. Moves arrays; knows nothing of experts' mathematics."""

from sharding.mesh import AXES, MeshSizes, make_mesh, parse_mesh
from sharding.rules import AxisRules, local_shape, mesh_axes

__all__ = ["AXES", "AxisRules", "MeshSizes", "local_shape", "make_mesh", "mesh_axes", "parse_mesh"]
