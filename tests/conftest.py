"""Strict settings for every test: no silent dtype or rank promotion, annotated shapes enforced, 8 simulated devices."""

import jax
import jaxtyping
import pytest

jaxtyping.install_import_hook(["k3jax", "pallas_kernels", "sharding"], "beartype.beartype")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests marked `gpu` where JAX sees no GPU."""
    if jax.default_backend() == "gpu":
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
