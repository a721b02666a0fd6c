"""Strict settings for every test: no silent dtype or rank promotion, annotated shapes enforced, 8 simulated devices."""

import gc
import os
from collections.abc import Iterator

import hypothesis
import jax
import jaxtyping
import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several test processes share one GPU
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # nothing may need NVLink multicast
jaxtyping.install_import_hook(["k3jax", "pallas_kernels", "sharding"], "beartype.beartype")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# An example's first run compiles, and on a busy machine making examples is slow too.
hypothesis.settings.register_profile("k3jax", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("fuzz", hypothesis.settings.get_profile("k3jax"), max_examples=10_000)
hypothesis.settings.load_profile("k3jax")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` and `gpu2` where JAX sees fewer GPUs, and `slow` ones unless `-m slow` asks for them."""
    gpus = jax.device_count() if jax.default_backend() == "gpu" else 0
    needed = {"gpu": (1, "needs a CUDA GPU"), "gpu2": (2, f"needs two CUDA GPUs, there are {gpus}")}
    absent = {marker: reason for marker, (count, reason) in needed.items() if gpus < count}
    if "slow" not in config.getoption("markexpr"):
        absent["slow"] = "takes minutes; -m slow runs it"
    for item in items:
        for marker, reason in absent.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def earlier_files_are_settled() -> None:
    """What earlier files compiled and keep is not searched again whenever the code under test collects garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def quickly_compiled() -> Iterator[None]:
    """For files that spend their time in compiling small programs: XLA optimises them little."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that claims to be a Hopper GPU; see `stand_in_kernel`."""
    from stand_in_kernel import claim_hopper

    claim_hopper(monkeypatch)
