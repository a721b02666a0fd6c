"""Faults of other implementations that only a mesh can have, and faults planted between ranks that tests must find."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from layers import random_arrays, random_tokens, small_config
from mesh_layers import CONFIG, LAYOUTS, arrays, assert_equal_stages, on_one_device, over_mesh, some_tokens, trace
from numerics import assert_same_bits, relative_l2
from ragged_contract import make_transfer

from k3jax import K3Config, LoadOptions, MoE, MoEArrays, Routing
from sharding import make_mesh
from sharding.dispatch import ReplicatedTokens
from sharding.transports import PerRank, Plan

routed: Any = jax.jit(
    lambda layer, x, routing: layer.routed(x, routing, dtype=jnp.float32),
    compiler_options={"xla_backend_optimization_level": "0"},
)


# Where every rank works on all of many tokens, what XLA's optimisation saves is more than it takes.
optimised: Any = jax.jit(lambda layer, x, mask: layer.trace(x, mask))


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_ragged_all_to_all_keeps_its_contract(ranks: int) -> None:
    """Fault 15: output offsets are the sender's view. With the receiver's, the result differs."""
    sizes = np.array([[1, 3], [2, 0]]) if ranks == 2 else np.random.default_rng(ranks).integers(0, 4, (8, 8))
    transfer, mesh = make_transfer(sizes), make_mesh(expert=ranks)
    expected = transfer.expected()
    np.testing.assert_array_equal(transfer.run(mesh), expected)
    receivers = dataclasses.replace(transfer, places=np.ascontiguousarray(transfer.places.T))
    assert not np.array_equal(receivers.run(mesh), expected)


@pytest.mark.parametrize("name", ["replicated-ep8", "gather-ep8", "per-rank-ep8"])
def test_masked_repeated_and_foreign_picks(name: str) -> None:
    """Faults 12 and 13: -1 contributes nothing, an expert named twice counts twice, wherever its rank is."""
    one = MoE(CONFIG, arrays=arrays("w4a16"))
    spread = over_mesh(dataclasses.replace(LAYOUTS[name], sizes=(1, 8, 1)), "w4a16", arrays("w4a16"))
    ids = jnp.array([[-1, 2], [-1, -1], [3, 3], [15, 0], [5, 5], [14, -1], [9, 8], [2, 13], [-1, -1]], jnp.int32)
    weights = jnp.asarray(np.random.default_rng(5).uniform(0.1, 1, ids.shape), jnp.float32)
    x = random_tokens((len(ids), 64))
    ours, theirs = (routed(layer, x, Routing(ids, weights)) for layer in (spread, one))
    assert relative_l2(ours, theirs) < 1e-6
    assert not bool(jnp.any(ours[jnp.array([1, 8])]))
    alone = routed(spread, x, Routing(ids.at[2, 1].set(-1), weights))
    assert relative_l2(alone[2] * (weights[2].sum() / weights[2, 0]), ours[2]) < 1e-6


@functools.cache
def many_experts() -> tuple[K3Config, MoEArrays, jax.Array, Routing]:
    """56 experts, and picks of 45 tokens."""
    config = small_config(
        hidden_size=32,
        routed_expert_hidden_size=32,
        moe_intermediate_size=32,
        num_experts=56,
        num_shared_experts=0,
        latent_moe_use_norm=False,
    )
    rng = np.random.default_rng(8)
    ids = np.array([rng.choice(56, 4, replace=False) for _ in range(45)], np.int32)
    weights = jnp.asarray(rng.uniform(0.1, 1, ids.shape), jnp.float32)
    return config, random_arrays(config, "w4a16"), random_tokens((45, 32)), Routing(jnp.asarray(ids), weights)


@pytest.mark.parametrize("ranks", [8, 4, 2])
def test_any_number_of_experts_a_rank(ranks: int) -> None:
    """Fault 16: 7, 14 and 28, with groups of rows that begin anywhere; 112 are in the next test."""
    config, weights, x, routing = many_experts()
    one, spread = (MoE(config, arrays=weights, mesh=mesh) for mesh in (None, make_mesh(expert=ranks)))
    assert relative_l2(routed(spread, x, routing), routed(one, x, routing)) < 1e-6


def test_widths_of_an_odd_number_of_blocks() -> None:
    """Fault 9: 96 a rank, three blocks of 32 that share a scale, is right; 360 would cut a block."""
    config, x = dataclasses.replace(CONFIG, moe_intermediate_size=192), random_tokens((9, 64))
    weights, mesh = random_arrays(config, "w4a8"), make_mesh(expert=4, tensor=2)
    one, spread = (MoE(config, recipe="w4a8", arrays=weights, mesh=over) for over in (None, mesh))
    routing = one.route(x)
    assert relative_l2(routed(spread, x, routing), routed(one, x, routing)) < 4e-3
    cut = dataclasses.replace(CONFIG, moe_intermediate_size=720)
    with pytest.raises(ValueError, match=r"leaves 360 a device.*multiples of 32"):
        MoE(cut, recipe="w4a8", arrays=random_arrays(CONFIG, "w4a8"), mesh=mesh)


def test_the_release_s_numbers_of_experts_picks_and_ranks() -> None:
    """Fault 19: 2,048 tokens, 16 of 896 experts, 8 ranks. The sum of experts in float32, and the block's output."""
    config = small_config(
        hidden_size=32,
        routed_expert_hidden_size=32,
        moe_intermediate_size=32,
        num_experts=896,
        num_experts_per_token=16,
    )
    weights = random_arrays(config, "w4a16")
    x = random_tokens((2048, 32))
    mask = np.ones(len(x), np.bool_)
    one = MoE(config, arrays=weights)
    theirs = trace(one, x, mask)["output"]
    routing = one.route(x)
    sums = routed(one, x, routing)
    mesh = make_mesh(expert=8)
    for tokens, wire, transport in (
        ("replicated", "f32", None),
        ("sharded", "f32", "per_rank"),
        ("sharded", "bf16", "per_rank"),
    ):
        options = LoadOptions(wire=wire, transport=transport)
        layer = MoE(config, arrays=weights, mesh=mesh, tokens=tokens, options=options)
        run = optimised if tokens == "replicated" else trace
        error = relative_l2(run(layer, x, mask)["output"], theirs)
        if wire == "f32":
            assert error <= 5e-4, (tokens, transport)
            assert relative_l2(routed(layer, x, routing), sums) <= 1e-6, (tokens, transport)
        else:
            assert 1e-4 < error <= 6e-3, (tokens, transport)


def test_encoded_rows_are_half_the_bytes_and_the_same_numbers() -> None:
    """w4a8 sends e4m3 values and a scale a block, and gets the numbers of rows that travelled in bfloat16."""
    layer = over_mesh(LAYOUTS["gather-ep8"], "w4a8", arrays("w4a8"))
    x, mask = some_tokens(), np.ones(len(some_tokens()), np.bool_)
    program = trace.lower(layer, x, mask).compile()
    encoded = program(layer, x, mask)
    lines = program.as_text().splitlines()
    gathered = [line.split("=")[1].split("[")[0].strip() for line in lines if " all-gather(" in line]
    assert {dtype.lstrip("(") for dtype in gathered} == {"u8", "s32", "f32"}
    layer.layout = dataclasses.replace(layer.layout, ranks=layer.layout.ranks.unencoded())
    plain = trace(layer, x, mask)
    for stage, value in plain.items():
        assert_same_bits(encoded[stage], value)


class WithoutOneRank(ReplicatedTokens):
    """Rank 3's part of the experts' sum gets lost."""

    def total(self, *parts: Any) -> tuple[Any, ...]:
        here = jax.lax.axis_index(self.experts) != 3
        return super().total(jnp.where(here, parts[0], 0.0), *parts[1:])


class SharedOnEveryRank(ReplicatedTokens):
    """Every rank adds the whole output of the shared experts."""

    def total(self, *parts: Any) -> tuple[Any, ...]:
        (whole,) = super().total(*parts[1:])
        return super().total(parts[0], whole)


class ReceiversOffsets(PerRank):
    """Rows go to where this rank puts what it gets from their receiver."""

    def plan(self, ids: Array, experts: int) -> Plan:
        plan = super().plan(ids, experts)
        return plan._replace(home=plan.starts)


def mutated(layer: MoE, mutation: type) -> MoE:
    """The layer with what moves between its ranks replaced."""
    ranks: Any = layer.layout.ranks
    if mutation is ReceiversOffsets:
        ranks = dataclasses.replace(ranks, transport=ReceiversOffsets(ranks.transport.axes, ranks.transport.ranks))
    else:
        ranks = mutation(*(getattr(ranks, field.name) for field in dataclasses.fields(ranks)))
    layer.layout = dataclasses.replace(layer.layout, ranks=ranks)
    return layer


@pytest.mark.parametrize(
    ("mutation", "name"),
    [
        (WithoutOneRank, "replicated-ep8"),
        (SharedOnEveryRank, "replicated-ep8"),
        (ReceiversOffsets, "per-rank-ep8"),
    ],
)
def test_planted_faults_are_found(mutation: type, name: str) -> None:
    """By the comparison that every layout must pass."""
    case = LAYOUTS[name]
    layer = mutated(over_mesh(case, "w4a16", arrays("w4a16")), mutation)
    stages = trace(layer, some_tokens(), np.ones(len(some_tokens()), np.bool_))
    with pytest.raises(AssertionError, match="allowed is"):
        assert_equal_stages(stages, on_one_device("w4a16")["uniform"], case.limit)
