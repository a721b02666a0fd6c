"""How layers are compiled: with what options, kept on disk, and for a few numbers of tokens only."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from k3jax.checkpoint.cache import cache_root


def compiler_options() -> dict[str, str]:
    """Those to compile layers with for a GPU: `jax.jit(function, compiler_options=k3jax.compiler_options())`.

    Kernels of a CUDA graph then run side by side where none needs the other's result, as those of a layer's shared
    experts beside its router's. Results are the same to the bit, and on a CPU nothing changes.
    """
    return {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}


def keep_compiled_programs() -> None:
    """Has JAX keep what it compiles for a GPU in `compiled` of k3jax's cache, for processes to come.

    Not where the caller has chosen a folder (`JAX_COMPILATION_CACHE_DIR`, `jax_compilation_cache_dir`), and not on a
    CPU: what is compiled for one may not run on the next, which may share the folder.
    """
    if jax.config.jax_compilation_cache_dir is None and jax.default_backend() != "cpu":
        jax.config.update("jax_compilation_cache_dir", str(cache_root() / "compiled"))


def pad_tokens(
    x: Float[Array, "t d"], sizes: tuple[int, ...], mask: Bool[Array, " t"] | None = None
) -> tuple[Float[Array, "n d"], Bool[Array, " n"]]:
    """`x [T, D]` made up with zeros to the smallest N of `sizes` that holds it, and the mask `[N]` of its tokens.

    A compiled layer is one for each number of tokens. So padded there is one for each of `sizes`:

        padded, mask = pad_tokens(x, (1, 8, 64, 512, 4096))
        y = jitted(layer, padded, mask)[: len(x)]

    Tokens that are added go to no expert: they cost the dense parts something, routed experts nothing. `mask` is that
    of `x`, where it has one.

    Raises:
        ValueError: `sizes` has none that is large enough.
    """
    count = x.shape[0]
    enough = [size for size in sizes if size >= count]
    if not enough:
        raise ValueError(f"pad_tokens: {count} tokens are more than the largest of {sizes=}")
    added = min(enough) - count
    own = jnp.ones(count, jnp.bool_) if mask is None else mask
    return jnp.pad(x, ((0, added), (0, 0))), jnp.pad(own, (0, added))
