"""What buffers and weights take on each device of a mesh: as stated, bounded, and given back."""

import gc
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from layers import SMALL, random_arrays, random_tokens, small_config

from k3jax import K3Config, LoadOptions, MoE
from k3jax.inspection.dispatch_memory import dispatch_memory
from k3jax.inspection.memory import moe_memory
from sharding import MeshSizes, make_mesh

WIDE = small_config(
    moe_intermediate_size=256,
    routed_expert_hidden_size=256,
    num_experts=64,
    num_experts_per_token=8,
    num_shared_experts=0,
)
TOKENS = 2048
call: Any = jax.jit(lambda layer, x: layer(x), compiler_options={"xla_backend_optimization_level": "0"})


@pytest.mark.parametrize(
    ("recipe", "sizes", "tokens", "options"),
    [
        ("w4a16", (1, 1, 1), "replicated", LoadOptions(max_tokens=512)),
        ("w4a8_fp8", (1, 8, 1), "replicated", LoadOptions(max_tokens=None)),
        ("w4a8", (2, 2, 2), "sharded", LoadOptions(transport="all_gather", max_tokens=512)),
    ],
)
def test_stated_bytes_are_those_of_the_compiled_layer(
    recipe: str, sizes: tuple[int, int, int], tokens: str, options: LoadOptions
) -> None:
    mesh = make_mesh(*sizes) if sizes != (1, 1, 1) else None
    arrays = random_arrays(WIDE, recipe)
    layer = MoE(WIDE, recipe=recipe, arrays=arrays, mesh=mesh, tokens=tokens, options=options)
    x = random_tokens((TOKENS, WIDE.hidden_size))
    taken = call.lower(layer, x).compile().memory_analysis().temp_size_in_bytes
    stated = dispatch_memory(WIDE, MeshSizes(*sizes), TOKENS, recipe=recipe, tokens=tokens, options=options).total
    assert 0.75 * stated < taken < 1.25 * stated


def test_the_default_bounds_a_prefill() -> None:
    """The number that `LoadOptions` states, whatever the batch."""
    release = K3Config.from_pretrained(Path(__file__).parent / "data" / "k3-config.json")
    for sizes, tokens in ((MeshSizes(), "replicated"), (MeshSizes(expert=8), "sharded")):
        found = dispatch_memory(release, sizes, 1_000_000, tokens=tokens)
        assert 2.6e9 < found.rows + found.hidden + found.travel < 3.0e9
        assert dispatch_memory(release, sizes, 2_000_000, tokens=tokens).rows == found.rows


@pytest.mark.parametrize("recipe", ["bf16", "w4a16"])
def test_weights_take_what_inspect_says(recipe: str) -> None:
    config = small_config(moe_intermediate_size=128)
    layer = MoE(config, recipe=recipe, arrays=random_arrays(config, recipe), mesh=make_mesh(1, 4, 2))
    held = np.zeros(8, np.int64)
    for leaf in jax.tree.leaves(layer):
        for shard in leaf.addressable_shards:
            held[shard.device.id] += shard.data.nbytes
    stated = moe_memory(config, MeshSizes(expert=4, tensor=2), packed=recipe == "w4a16").total
    assert held.tolist() == [stated] * 8


def test_twenty_meshes_made_and_dropped_leave_nothing() -> None:
    arrays, x = random_arrays(SMALL, "w4a16"), random_tokens((8, 128))

    def run(index: int) -> None:
        devices = np.roll(jax.devices(), index % 4).tolist()
        mesh = make_mesh(expert=4, data=2, devices=devices)
        layer = MoE(SMALL, arrays=arrays, mesh=mesh, tokens=("replicated", "sharded")[index % 2])
        layer.route(x).ids.block_until_ready()

    def live_bytes() -> int:
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    run(0)
    before = live_bytes()
    for index in range(20):
        run(index)
    assert live_bytes() == before
