"""A prefill with all experts on one H200 that is not there: the experts' buffers are bounded, as stated."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from annotations import unchecked_annotations
from jax.sharding import Mesh

from k3jax import K3Config, MoE
from k3jax.inspection.dispatch_memory import dispatch_memory
from k3jax.moe_arrays import MoEArrays
from sharding import MeshSizes

CONFIG = K3Config.from_pretrained(Path(__file__).parents[1] / "data" / "k3-config.json")
TOKENS = 16384


def test_a_prefill_of_all_experts_takes_no_more_than_is_stated(
    hopper: Mesh, choose_for: Callable[[Mesh], None]
) -> None:
    """Twice the tokens that experts take at a time; beside their buffers there are those of the shared experts."""
    choose_for(hopper)
    with unchecked_annotations(), jax.set_mesh(hopper):
        layer = MoE(CONFIG, implementation="mosaic", arrays=MoEArrays.abstract(CONFIG, packed=True))
        x = jax.ShapeDtypeStruct((TOKENS, CONFIG.hidden_size), jnp.bfloat16)
        memory = jax.jit(MoE.__call__).trace(layer, x).lower(lowering_platforms=("cuda",)).compile().memory_analysis()
    stated = dispatch_memory(CONFIG, MeshSizes(), TOKENS)
    print(f"{memory.temp_size_in_bytes} bytes, for which {stated} allows {stated.total}")
    assert memory.temp_size_in_bytes < stated.total
    assert stated.rows == dispatch_memory(CONFIG, MeshSizes(), 1000 * TOKENS).rows
