"""Compiles for GPUs that are not there: the CUDA plugin without a driver, and the assembler of the `aot` group."""

import functools
import importlib.util
import os
import string
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest
from compiled_mosaic import ARCHITECTURES, Target, compiled_for
from jax.experimental import topologies

jax.config.update("jax_platforms", "cpu")
os.environ["JAX_TRITON_DUMP_DIR"] = tempfile.mkdtemp()  # read when jax-triton is imported

# A GPU, as XLA's deviceless compilation wants it described.
_DESCRIPTION = string.Template("""
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: $cores fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: $memory
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 device_address_bits: 64 ecc_enabled: true
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.9 device_memory_size: 150000000000
  cuda_compute_capability { major: $major minor: 0 $features }
  device_vendor: "NVIDIA Corporation" name: "$name"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0"
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 12 } device_description_str: "$name"
""")
_GPUS = {
    "ampere": (8, 108, 166_912, "NVIDIA A100"),
    "hopper": (9, 132, 232_448, "NVIDIA H200"),
    "blackwell": (10, 148, 232_448, "NVIDIA B200"),
}


@pytest.fixture(scope="session", autouse=True)
def assembler() -> None:
    """The `ptxas` of the `aot` group before the system's, which may be too old for the PTX that XLA writes."""
    for name in ("nvidia", "nvidia.cu13"):
        spec = importlib.util.find_spec(name)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            for binary in Path(folder).glob("**/bin/ptxas"):
                os.environ["PATH"] = f"{binary.parent}{os.pathsep}{os.environ['PATH']}"
                return
    pytest.fail("no ptxas: run `uv run --group aot pytest tests/aot`")


@pytest.fixture(scope="session")
def gpus() -> Callable[[str, int], list[jax.Device]]:
    """`gpus("hopper", 8)`: that many GPUs of one node, on paper; "ampere", "hopper" or "blackwell"."""

    @functools.cache
    def make(kind: str, count: int) -> list[jax.Device]:
        major, cores, memory, name = _GPUS[kind]
        features = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        target = _DESCRIPTION.substitute(major=major, cores=cores, memory=memory, name=name, features=features)
        description = topologies.get_topology_desc("", "cuda", topology=f"1x1x{count}", target_config=target)
        return list(description.devices)

    return make


@pytest.fixture(scope="session")
def hopper(gpus: Callable[[str, int], list[jax.Device]]) -> jax.sharding.Mesh:
    """A mesh of one H200 that exists on paper."""
    return jax.sharding.Mesh(gpus("hopper", 1), ("device",))


@pytest.fixture(scope="session")
def target(gpus: Callable[[str, int], list[jax.Device]]) -> Target:
    """What Mosaic compiles for in this process, which can be one architecture only."""
    kind = compiled_for()
    return Target(ARCHITECTURES[kind], jax.sharding.Mesh(gpus(kind, 1), ("device",)))


@pytest.fixture
def choose_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[jax.sharding.Mesh], None]]:
    """`choose_for(mesh)` has kernels chosen as where the mesh's devices are JAX's own.

    JAX keeps what it traced, and so what was chosen: it is forgotten before, and afterwards.
    """

    def choose(mesh: jax.sharding.Mesh) -> None:
        monkeypatch.setattr(jax, "devices", lambda: list(mesh.devices.flat))
        jax.clear_caches()

    yield choose
    jax.clear_caches()
