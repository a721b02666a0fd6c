"""Programs kept on disk, and batches made up to a few sizes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layers import random_arrays, random_tokens, small_config
from numerics import assert_same_bits

from k3jax import GatedMLP, MoE, compiler_options, pad_tokens
from k3jax.compiling import keep_compiled_programs
from pallas_kernels import SwiGLU


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of k3jax's own, and JAX's settings as they were."""
    monkeypatch.setenv("K3JAX_CACHE", str(tmp_path))
    least = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()


def test_what_a_gpu_runs_is_kept(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    keep_compiled_programs()
    jax.jit(lambda x: x * 12345.0)(jnp.ones(3)).block_until_ready()
    assert any((own_cache / "compiled").iterdir())


def test_a_folder_of_the_callers_stays(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.config.update("jax_compilation_cache_dir", str(own_cache / "mine"))
    keep_compiled_programs()
    assert str(own_cache / "mine") == jax.config.jax_compilation_cache_dir


def test_nothing_is_kept_for_a_cpu(own_cache: Path) -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("there is a GPU")
    keep_compiled_programs()
    assert jax.config.jax_compilation_cache_dir is None


def test_the_options_are_some_that_xla_knows_and_change_no_result() -> None:
    layer = GatedMLP.random(128, 64, activation=SwiGLU(), rngs=nnx.Rngs(0))
    x = random_tokens((8, 128))
    with_options: Any = jax.jit(lambda layer, x: layer(x), compiler_options=compiler_options())
    assert_same_bits(with_options(layer, x), jax.jit(lambda layer, x: layer(x))(layer, x))


def test_a_padded_batch_gives_the_same_and_compiles_once() -> None:
    config = small_config(num_experts=4, num_experts_per_token=2, num_shared_experts=0)
    arrays = random_arrays(config, "bf16")
    layer = MoE(config, recipe="bf16", implementation="reference", arrays=arrays)
    call: Any = jax.jit(lambda layer, x, mask: layer(x, mask))
    x = random_tokens((8, 128))
    own = jnp.arange(8) != 2
    whole = call(layer, x, own)
    for count in (8, 5, 3):
        padded, mask = pad_tokens(x[:count], (2, 8, 64), own[:count])
        assert padded.shape == (8, 128)
        assert mask.tolist() == [*own[:count].tolist(), *[False] * (8 - count)]
        assert_same_bits(call(layer, padded, mask)[:count], whole[:count])
    assert call._cache_size() == 1
    np.testing.assert_array_equal(pad_tokens(x, (8,))[1], [True] * 8)
    with pytest.raises(ValueError, match="8 tokens are more than the largest"):
        pad_tokens(x, (1, 4))
