"""Mosaic kernels compiled for GPUs that are not there: for which one a process compiles."""

import os
from typing import NamedTuple

import jax

TARGET_VARIABLE = "K3JAX_TESTS_COMPILE_FOR"  # of the environment: a key of ARCHITECTURES
ARCHITECTURES = {"hopper": "sm_90a", "blackwell": "sm_100a"}


def compiled_for() -> str:
    """The key of what this process compiles for: Hopper if nothing else is asked."""
    return os.environ.get(TARGET_VARIABLE, "hopper")


class Target(NamedTuple):
    """An architecture, and a mesh of one GPU of it that exists on paper."""

    architecture: str
    mesh: jax.sharding.Mesh
