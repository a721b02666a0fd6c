"""The programs behind a row of `k3jax bench --op ep`: a layer over ranks in three parts, and bare collectives."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from k3jax.bench.calls import Program, compiled
from k3jax.experts import HowToMultiply, gate_and_up_rows, routed_experts
from k3jax.moe import MoE, latents
from k3jax.parameters import parameter_specs
from k3jax.routing import Routing
from sharding.dispatch import Arrived

_BY_RANK = PartitionSpec("expert")


def over_ranks(array: Array, mesh: Mesh) -> Array:
    """`[R T, ...]`, a part on each rank."""
    return jax.device_put(array, NamedSharding(mesh, _BY_RANK))


def latent_rows(layer: MoE, x: Array) -> Array:
    """What travels: `[R T, D] -> [R T, L]`."""
    assert layer.latent_down is not None
    return latents(x, layer.latent_down.get_value())


def dispatch_program(layer: MoE, latent: Array, routing: Routing) -> Program:
    """Rows, ids and weights to the ranks of their experts; whatever this needs to know included."""
    ranks = layer.layout.ranks

    def dispatch(layer: MoE, latent: Array, routing: Routing) -> Arrived:
        return ranks.dispatch(latent, routing.ids, routing.weights, layer.w13.get_value().shape[0])

    return _on_ranks(dispatch, layer, latent, routing)


def experts_program(layer: MoE, arrived: Arrived) -> Program:
    """The experts' sums of the rows that arrived."""
    how = HowToMultiply(layer.config.activation, layer.recipe, layer.implementation, layer.layout.ranks)

    def experts(layer: MoE, arrived: Arrived) -> Array:
        w13, w2 = gate_and_up_rows(layer.w13.get_value()), layer.w2.get_value()
        return routed_experts(arrived.rows, Routing(arrived.ids, arrived.weights), w13, w2, how)

    return _on_ranks(experts, layer, arrived)


def combine_program(layer: MoE, sums: Array, arrived: Arrived) -> Program:
    """The sums back to the ranks of their tokens, added."""
    ranks = layer.layout.ranks
    return _on_ranks(lambda layer, sums, arrived: ranks.combine(sums, arrived), layer, sums, arrived)


def all_to_all_program(mesh: Mesh, sent: float) -> Program:
    """A plain all-to-all in which each rank sends `sent` bytes to others, rounded up."""
    ranks = mesh.shape["expert"]
    each = max(math.ceil(sent / (ranks - 1)), 1)
    exchange = functools.partial(jax.lax.all_to_all, axis_name="expert", split_axis=0, concat_axis=0, tiled=True)
    return compiled(_mapped(exchange, mesh), _numbers(mesh, (ranks * ranks, each)))


def copy_program(mesh: Mesh) -> tuple[Program, float]:
    """Each rank's large array to its neighbour, and how many bytes that are: at what rate the link copies."""
    ranks = mesh.shape["expert"]
    length = (1 << 28) if jax.default_backend() == "gpu" else (1 << 20)
    around = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
    copy = functools.partial(jax.lax.ppermute, axis_name="expert", perm=around)
    return compiled(_mapped(copy, mesh), _numbers(mesh, (ranks, length))), float(length)


def _on_ranks(body: Callable[..., Any], layer: MoE, *operands: Any) -> Program:
    """`body(layer, *operands)` on every rank, with its part of each."""
    assert layer.layout.mesh is not None
    specs = (parameter_specs(layer, layer.layout.rules), *(_BY_RANK for _ in operands))
    return compiled(_mapped(body, layer.layout.mesh, specs), layer, *operands)


def _mapped(body: Callable[..., Any], mesh: Mesh, specs: Any = _BY_RANK) -> Callable[..., Any]:
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=_BY_RANK, check_vma=False)


def _numbers(mesh: Mesh, shape: tuple[int, ...]) -> Array:
    """Random bytes, the same on every rank."""
    part = np.random.default_rng(0).integers(0, 256, (shape[0] // mesh.shape["expert"], *shape[1:]), np.uint8)
    return jax.make_array_from_callback(shape, NamedSharding(mesh, _BY_RANK), lambda index: part)
