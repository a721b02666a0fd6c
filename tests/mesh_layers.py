"""Layers over meshes of 8 simulated devices, in every parallel layout, and what they are compared with."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from layers import random_arrays, random_tokens, small_config
from numerics import relative_l2

from k3jax import LoadOptions, MoE, MoEArrays
from k3jax.options import DEFAULTS
from sharding import make_mesh

CONFIG = small_config(hidden_size=64, routed_expert_hidden_size=32, moe_intermediate_size=128, num_experts_per_token=2)
TOKENS = 52  # no multiple of 8


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout: sizes of data, expert and tensor, where tokens are, and options."""

    sizes: tuple[int, int, int]
    tokens: str = "replicated"
    options: LoadOptions = DEFAULTS

    @property
    def limit(self) -> float:
        """How far a stage may be from one device's; where F is split, rows are rounded after the sum and not before."""
        return 6e-3 if self.options.wire == "bf16" else 4e-3 if self.sizes[2] > 1 else 5e-4


LAYOUTS = {
    "replicated-ep8": Case((1, 8, 1)),
    "replicated-ep2-tp4": Case((1, 2, 4)),
    "replicated-dp2-ep2-tp2-bf16": Case((2, 2, 2), options=LoadOptions(wire="bf16")),
    "gather-ep8": Case((1, 8, 1), "sharded", LoadOptions(transport="all_gather")),
    "gather-dp2-ep2-tp2-split": Case((2, 2, 2), "sharded", LoadOptions(transport="all_gather", split_shared=True)),
    "per-rank-ep8": Case((1, 8, 1), "sharded", LoadOptions(transport="per_rank", max_tokens=32)),
    "per-rank-dp2-ep4-bf16": Case((2, 4, 1), "sharded", LoadOptions(transport="per_rank", wire="bf16")),
    "sharded-dp8": Case((8, 1, 1), "sharded"),
}

# Half the time to compile, and the same numbers.
trace: Any = jax.jit(
    lambda layer, x, mask: layer.trace(x, mask), compiler_options={"xla_backend_optimization_level": "0"}
)


@functools.cache
def arrays(recipe: str) -> MoEArrays:
    """Rounding rows after the sum over parts of F, not before it, moves the output by 3.5e-3 to 4.0e-3 by the seed."""
    return random_arrays(CONFIG, recipe, seed=2)


def over_mesh(case: Case, recipe: str, weights: MoEArrays) -> MoE:
    return MoE(
        CONFIG, recipe=recipe, arrays=weights, mesh=make_mesh(*case.sizes), tokens=case.tokens, options=case.options
    )


def distributions(
    weights: MoEArrays, tokens: int = TOKENS, picks: int = CONFIG.experts_per_token
) -> dict[str, tuple[MoEArrays, np.ndarray]]:
    """Weights and a mask of tokens for picks that are even, all on the first rank, skewed, and none at all.

    Biases choose experts: those of 10 are picked by every token.
    """
    num_experts = weights.router_bias.shape[0]
    hot = jnp.zeros(num_experts).at[:picks].set(10.0)
    skewed = jnp.asarray(np.random.default_rng(3).permutation(np.geomspace(1e-3, 1, num_experts)), jnp.float32)
    everyone = np.ones(tokens, np.bool_)
    return {
        "uniform": (weights, everyone),
        "hot": (dataclasses.replace(weights, router_bias=hot), everyone),
        "skewed": (dataclasses.replace(weights, router_bias=skewed), np.arange(tokens) % 7 > 0),
        "zero": (weights, ~everyone),
    }


@functools.cache
def on_one_device(recipe: str) -> dict[str, dict[str, jax.Array]]:
    """The stages of the same layer without a mesh, for each distribution."""
    return {
        name: trace(MoE(CONFIG, recipe=recipe, arrays=weights), some_tokens(), mask)
        for name, (weights, mask) in distributions(arrays(recipe)).items()
    }


@functools.cache
def some_tokens() -> jax.Array:
    return random_tokens((TOKENS, CONFIG.hidden_size))


def assert_equal_stages(ours: dict[str, jax.Array], theirs: dict[str, jax.Array], limit: float) -> None:
    """Fails unless every stage is there, in its shape and dtype, and within `limit` of the other in relative L2."""
    assert set(ours) == set(theirs)
    for stage, value in ours.items():
        other = theirs[stage]
        assert (value.shape, value.dtype) == (other.shape, other.dtype), stage
        assert bool(jnp.all(jnp.isfinite(value))), stage
        error = relative_l2(value, other)
        assert error <= limit, f"{stage}: {error:.1e}, allowed is {limit:.0e}"
