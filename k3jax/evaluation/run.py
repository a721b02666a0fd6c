"""Evaluates layers over a token file: the same program for one device, a mesh, and a mesh over several hosts.

Every host runs `evaluate`. Each reads of the checkpoint and of the tokens what its own devices need; all learn the
statistics, the host of process 0 writes the results.
"""

import dataclasses
import gc
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from k3jax.checkpoint import Checkpoint
from k3jax.config import K3Config
from k3jax.evaluation.tokens import TokenFile
from k3jax.loading import load_layer
from k3jax.mlp import GatedMLP
from k3jax.moe import MoE
from k3jax.options import DEFAULTS, LoadOptions
from k3jax.routing import expert_load
from sharding import AxisRules, MeshSizes, layout_rules, make_mesh, partition_spec

Array = NDArray[Any]
Progress = Callable[[int, int, str], None]
Layout = Literal["replicated", "sharded"]
Keep = Callable[[int, int, Array], None]
"""Takes a layer, the number of a token, and the layer's output `[t, D]` from that token on."""

DEFAULT_BATCH = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What to evaluate.

    Attributes:
        layers: None for those that the token file has inputs for, or for all of the model.
        mesh: None for one device without a mesh. layout: of the tokens, on a mesh.
        batch: tokens that a layer is given at a time, over all ranks.
    """

    checkpoint: Path
    tokens: Path
    layers: tuple[int, ...] | None = None
    mesh: MeshSizes | None = None
    layout: Layout = "replicated"
    recipe: str = "w4a16"
    implementation: str | None = None
    batch: int = DEFAULT_BATCH
    options: LoadOptions = DEFAULTS


@dataclasses.dataclass(frozen=True)
class LayerStatistics:
    """What one layer did with its tokens.

    Attributes:
        tokens: how many. seconds: in the layer, without loading and compiling.
        rms: root mean square of the output. non_finite: elements that are NaN or infinite.
        relative_l2: of the output against the token file's, where that has one.
        expert_rows: rows that each expert computed. rank_rows: rows of each rank of `expert`. Empty for a dense layer.
    """

    layer: int
    kind: Literal["dense", "moe"]
    tokens: int
    seconds: float
    rms: float
    non_finite: int
    relative_l2: float | None = None
    expert_rows: tuple[int, ...] = ()
    rank_rows: tuple[int, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the layer alone."""
        return self.tokens / self.seconds


@dataclasses.dataclass(frozen=True)
class Plan:
    """A request with its files opened and its choices made; the `rules` say how tokens lie on the mesh."""

    request: Request
    config: K3Config
    tokens: TokenFile
    layers: tuple[int, ...]
    mesh: jax.sharding.Mesh | None
    rules: AxisRules

    def places(self, *axes: str) -> jax.sharding.Sharding:
        """Where an array lies whose first dimensions have these logical axes and whose others are whole."""
        if self.mesh is None:
            return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return NamedSharding(self.mesh, partition_spec(axes, self.rules))

    def batch(self, tokens: int) -> int:
        """How many of a layer's `tokens` it is given at a time: as asked for, rounded up to share them evenly."""
        size = min(self.request.batch, tokens)
        shards = 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in self.rules.tokens)
        return -(-size // shards) * shards


def plan(request: Request) -> Plan:
    """Opens what the request names; raises before any work.

    Raises:
        FileNotFoundError, ValueError: a file is missing or malformed, a layer has no input, or the mesh is too large.
    """
    if request.batch < 1:
        raise ValueError(f"batch={request.batch} must be at least 1")
    config = Checkpoint.open(request.checkpoint).config
    tokens = TokenFile.open(request.tokens, config.hidden_size)
    layers = request.layers or tokens.layers or tuple(range(config.num_hidden_layers))
    for layer in layers:
        config.is_moe(layer)
        tokens.of_layer(layer)
    mesh = None
    if request.mesh is not None:
        mesh = make_mesh(**dataclasses.asdict(request.mesh))
        if mesh.size != jax.device_count():
            raise ValueError(
                f"the mesh {request.mesh} has {mesh.size} devices; all hosts together {jax.device_count()}"
            )
    elif jax.process_count() > 1:
        raise ValueError(f"{jax.process_count()} hosts need a mesh over all their {jax.device_count()} devices")
    rules = layout_rules(request.layout, request.options.split_shared)
    return Plan(request, config, tokens, layers, mesh, rules)


def evaluate(
    plan: Plan,
    progress: Progress = lambda done, total, what: None,
    keep: Keep = lambda layer, start, output: None,
) -> Iterator[LayerStatistics]:
    """Each layer's statistics, as they come; `keep` gets the outputs, on every host. One layer is in memory at a time.

    Every host must take all items: the layers' collectives wait for all of them.
    """
    request = plan.request
    batches = {layer: _starts(plan, layer) for layer in plan.layers}
    total, done = sum(map(len, batches.values())), 0
    for layer in plan.layers:
        progress(done, total, f"loading layer {layer}")
        loaded = load_layer(
            request.checkpoint,
            layer,
            mesh=plan.mesh,
            tokens=request.layout,
            recipe=request.recipe,
            implementation=request.implementation,
            options=request.options,
        )
        totals = _Totals(layer, plan)
        step = _compiled(plan, loaded, layer)
        for start in batches[layer]:
            progress(done, total, f"layer {layer}")
            totals.add(*_run(plan, step, loaded, layer, start), start, keep)
            done += 1
        yield totals.statistics()
        del loaded, step
        gc.collect()  # Modules refer to themselves: without this, two layers would be in memory at once.
    progress(total, total, "done")


def _starts(plan: Plan, layer: int) -> range:
    tokens = len(plan.tokens.of_layer(layer))
    return range(0, tokens, plan.batch(tokens))


def _inputs(plan: Plan, layer: int, start: int) -> tuple[jax.Array, jax.Array]:
    """A batch `x [B, D]` and its mask `[B]`, False beyond the last token; a host reads its own devices' rows only."""
    tokens = plan.tokens.of_layer(layer)
    size = plan.batch(len(tokens))

    def bounds(index: tuple[slice, ...] | None) -> tuple[int, int]:
        low, high, _ = slice(None).indices(size) if index is None else index[0].indices(size)
        return low, high

    def rows(index: tuple[slice, ...] | None) -> Array:
        low, high = bounds(index)
        given = tokens.read(start + low, start + high)
        return np.pad(given, ((0, high - low - len(given)), (0, 0)))

    def exists(index: tuple[slice, ...] | None) -> Array:
        low, high = bounds(index)
        return np.arange(start + low, start + high) < len(tokens)

    x = jax.make_array_from_callback((size, tokens.shape[1]), plan.places("tokens"), rows)
    return x, jax.make_array_from_callback((size,), plan.places("tokens"), exists)


_Step = Callable[[GatedMLP | MoE, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def _compiled(plan: Plan, layer: GatedMLP | MoE, number: int) -> _Step:
    """The layer and its expert load, compiled for its batches: compiling is no part of what is timed."""
    step = jax.jit(_output_and_load, out_shardings=(plan.places("tokens"), plan.places()))
    compiled: _Step = step.lower(layer, *_inputs(plan, number, 0)).compile()
    return compiled


def _output_and_load(layer: GatedMLP | MoE, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    if not isinstance(layer, MoE):
        return layer(x, mask), jnp.zeros(0, jnp.int32)
    assert layer.config.num_experts is not None
    return layer(x, mask), expert_load(layer.route(x, mask), layer.config.num_experts).per_expert


def _run(plan: Plan, step: _Step, layer: GatedMLP | MoE, number: int, start: int) -> tuple[Array, Array, float]:
    """The output of the batch from token `start` on, without its padding; rows of each expert; seconds."""
    x, mask = jax.block_until_ready(_inputs(plan, number, start))
    began = time.perf_counter()
    y, per_expert = jax.block_until_ready(step(layer, x, mask))
    seconds = time.perf_counter() - began
    gathered = np.asarray(jax.jit(lambda y: y, out_shardings=plan.places())(y))
    return gathered[: len(plan.tokens.of_layer(number)) - start], np.asarray(per_expert), seconds


class _Totals:
    """Sums of one layer's batches, in float64."""

    def __init__(self, layer: int, plan: Plan) -> None:
        self._layer, self._plan = layer, plan
        self._truth = plan.tokens.outputs.get(layer)
        self._tokens = self._non_finite = 0
        self._seconds = self._squares = self._error = self._truth_squares = 0.0
        self._rows: Array = np.zeros(0, np.int64)

    def add(self, output: Array, rows: Array, seconds: float, start: int, keep: Keep) -> None:
        """Counts one batch in and passes it on."""
        wide = output.astype(np.float64)
        self._tokens += len(output)
        self._seconds += seconds
        self._squares += float(np.sum(wide**2))
        self._non_finite += int(np.count_nonzero(~np.isfinite(wide)))
        self._rows = rows.astype(np.int64) + (self._rows if self._rows.size else 0)
        if self._truth is not None:
            truth = self._truth.read(start, start + len(output)).astype(np.float64)
            self._error += float(np.sum((wide - truth) ** 2))
            self._truth_squares += float(np.sum(truth**2))
        keep(self._layer, start, output)

    def statistics(self) -> LayerStatistics:
        """What the batches add up to."""
        is_moe = self._plan.config.is_moe(self._layer)
        ranks = 1 if self._plan.mesh is None else self._plan.mesh.shape["expert"]
        elements = self._tokens * self._plan.config.hidden_size
        relative = None if self._truth is None else math.sqrt(_ratio(self._error, self._truth_squares))
        return LayerStatistics(
            layer=self._layer,
            kind="moe" if is_moe else "dense",
            tokens=self._tokens,
            seconds=self._seconds,
            rms=math.sqrt(self._squares / elements),
            non_finite=self._non_finite,
            relative_l2=relative,
            expert_rows=tuple(self._rows.tolist()),
            rank_rows=tuple(self._rows.reshape(ranks, -1).sum(axis=1).tolist()) if is_moe else (),
        )


def _ratio(error: float, truth: float) -> float:
    """`error / truth`; 0 where both are."""
    return error / truth if truth else (math.inf if error else 0.0)
