"""`k3jax bench --op ep`: dispatch, experts and combine over ranks, beside bare collectives, and the layer beside one
device that holds all experts."""

import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from k3jax.bench import ep_calls, layer_calls, run
from k3jax.bench.calls import Program
from k3jax.bench.ep_cases import TRANSPORTS, EpCase, Sent, bytes_sent
from k3jax.bench.layer_cases import LayerCase
from k3jax.bench.timing import Stopwatch, Timer, Timing, default_timer
from k3jax.moe import MoE
from k3jax.options import LoadOptions
from pallas_kernels import explain
from sharding import MeshSizes, make_mesh

ERROR_LIMIT = 6e-3  # relative L2 of the layer over ranks against the layer on one device
PARTS = ("dispatch", "experts", "combine")


@dataclasses.dataclass(frozen=True)
class EpResult:
    """One case by one transport; microseconds are medians, on the first of the ranks.

    Attributes:
        parts: of PARTS, each a program of its own. all_to_all: bare ones that send as much as dispatch and combine.
        sent: by this transport, under the picks of the run.
        whole, one_device: the layer over ranks, and on one device that has all experts, for all ranks' tokens.
        error: relative L2 of the one's output against the other's.
    """

    case: EpCase
    transport: str
    implementation: str
    parts: dict[str, Timing]
    all_to_all: dict[str, Timing]
    sent: Sent
    whole: Timing
    one_device: Timing
    error: float

    @property
    def rates(self) -> dict[str, float]:
        """Bytes a second that a rank sends in dispatch and in combine, each bare and not."""
        sent = dataclasses.asdict(self.sent)
        bare = {f"{name}_all_to_all": sent[name] / timing.us * 1e6 for name, timing in self.all_to_all.items()}
        return {name: amount / self.parts[name].us * 1e6 for name, amount in sent.items()} | bare

    @property
    def exchange_us(self) -> float:
        """Dispatch and combine."""
        return self.parts["dispatch"].us + self.parts["combine"].us

    @property
    def all_to_all_share(self) -> float:
        """What dispatch and combine reach of the bandwidth of bare all-to-alls."""
        return sum(timing.us for timing in self.all_to_all.values()) / self.exchange_us

    @property
    def exchange_rate(self) -> float:
        """Bytes a second that a rank sends in dispatch and combine together."""
        return (self.sent.dispatch + self.sent.combine) / self.exchange_us * 1e6

    @property
    def speedup(self) -> float:
        """Tokens a second over ranks, over those of one device."""
        return self.one_device.us / self.whole.us

    @property
    def ok(self) -> bool:
        return self.error <= ERROR_LIMIT  # False for a NaN

    def flat(self) -> dict[str, Any]:
        """As an object of the JSON."""
        layer = dataclasses.asdict(self.case.layer)
        return {
            "op": "ep",
            "transport": self.transport,
            "implementation": self.implementation,
            "ranks": self.case.ranks,
            **layer,
            "tokens": self.case.tokens,
            "groups": self.case.layer.groups // self.case.ranks,
            **{f"{name}_us": self.parts[name].us for name in PARTS},
            **{f"{name}_all_to_all_us": timing.us for name, timing in self.all_to_all.items()},
            **{f"{name}_bytes": amount for name, amount in dataclasses.asdict(self.sent).items()},
            **{f"{name}_gbs": rate / 1e9 for name, rate in self.rates.items()},
            "exchange_gbs": self.exchange_rate / 1e9,
            "all_to_all_share": self.all_to_all_share,
            "layer_us": self.whole.us,
            "layer_us_min": self.whole.us_min,
            "layer_us_max": self.whole.us_max,
            "one_device_us": self.one_device.us,
            "one_device_parts": len(self.case.parts),
            "layer_tokens_per_second": self.case.layer.tokens / self.whole.us * 1e6,
            "speedup": self.speedup,
            "timer": self.whole.timer,
            "error": self.error,
        }


@dataclasses.dataclass(frozen=True)
class EpRun:
    """All results, and what they were measured with; `link` is the rate of copies to a neighbour, bytes a second."""

    device: str
    jax: str
    timer: Timer
    link: float
    results: tuple[EpResult, ...]

    @property
    def ok(self) -> bool:
        return all(result.ok for result in self.results)


def plan(request: run.Request, sizes: MeshSizes) -> tuple[EpCase, ...]:
    """The cases, recipe by recipe.

    Raises:
        ValueError: an option means nothing here, a number is too small, or there are not that many devices.
        NotImplementedError: the named implementation cannot run a case.
    """
    if request.ops != ("ep",):
        raise ValueError(f"op ep, and no other, runs over a mesh: ask for it alone, not for {', '.join(request.ops)}")
    if sizes.expert < 2 or sizes.devices > sizes.expert:
        raise ValueError(f"op ep is for ranks of expert alone, at least two, such as --mesh expert=2; not {sizes}")
    make_mesh(expert=sizes.expert)
    experts = request.groups * sizes.expert
    tokens = tuple(sizes.expert * count for count in request.tokens)
    alone = dataclasses.replace(request, ops=("layer",), groups=experts, tokens=tokens)
    layers = (case for case in run.plan(alone) if isinstance(case, LayerCase))
    return tuple(EpCase(layer, sizes.expert, layer.tokens // sizes.expert) for layer in layers)


def measure(
    request: run.Request,
    cases: tuple[EpCase, ...],
    progress: run.Progress = lambda done, total, what: None,
    keep: Callable[[EpRun], None] = lambda so_far: None,
) -> EpRun:
    """Times the cases. `keep` gets all results so far after each one.

    Raises:
        NotImplementedError: the implementation cannot take these weights.
        OSError: the GPU's profile does not show the calls.
    """
    mesh = make_mesh(expert=cases[0].ranks)
    stopwatch = Stopwatch(request.repeats, request.timer or default_timer())
    progress(0, 2 * len(cases), "the link")
    copy, amount = ep_calls.copy_program(mesh)
    device = f"{mesh.size} x {jax.devices()[0].device_kind}"
    so_far = EpRun(device, jax.__version__, stopwatch.timer, amount / stopwatch.time(copy).us * 1e6, ())
    for _, same in itertools.groupby(cases, lambda case: case.layer.recipe):
        for result in _timed(tuple(same), request, mesh, stopwatch):
            so_far = dataclasses.replace(so_far, results=(*so_far.results, result))
            progress(len(so_far.results), 2 * len(cases), f"{result.case.layer.recipe} {result.transport}")
            keep(so_far)
    return so_far


def as_json(run: EpRun) -> list[dict[str, Any]]:
    """One object a case and transport."""
    machine = {"device": run.device, "jax": run.jax, "link_gbs": run.link / 1e9}
    return [result.flat() | machine for result in run.results]


def _timed(cases: tuple[EpCase, ...], request: run.Request, mesh: Mesh, stopwatch: Stopwatch) -> Iterator[EpResult]:
    """Results of cases of one layer: first on one device, then by each transport."""
    config, arrays = layer_calls.make_weights(cases[0].layer)
    how: dict[str, Any] = {"recipe": cases[0].layer.recipe, "implementation": request.implementation, "arrays": arrays}
    layer = MoE(config, **how)
    alone = [_on_one_device(case, layer, stopwatch) for case in cases]
    del layer
    gc.collect()
    for transport in TRANSPORTS:
        options = LoadOptions(transport=transport)
        layer = MoE(config, mesh=mesh, tokens="sharded", options=options, **how)
        for case, (x, y, timing) in zip(cases, alone, strict=True):
            yield _over_ranks(case, layer, transport, (x, y, timing), stopwatch)
        del layer
        gc.collect()


def _on_one_device(case: EpCase, layer: MoE, stopwatch: Stopwatch) -> tuple[np.ndarray, np.ndarray, Timing]:
    """Tokens, the layer's output for them, and the time that it takes part by part."""
    x = layer_calls.make_tokens(case.layer, layer)
    parts = [x[part] for part in case.parts]
    programs = [layer_calls.layer_program(layer, part) for part in parts]
    timing = stopwatch.time(lambda: [program() for program in programs])
    return np.asarray(x), np.concatenate([np.asarray(program()) for program in programs]), timing


def _over_ranks(
    case: EpCase, layer: MoE, transport: str, alone: tuple[np.ndarray, np.ndarray, Timing], stopwatch: Stopwatch
) -> EpResult:
    tokens, truth, one_device = alone
    mesh = layer.layout.mesh
    assert mesh is not None
    x = ep_calls.over_ranks(jax.numpy.asarray(tokens), mesh)
    whole = layer_calls.layer_program(layer, x)
    error = relative_error(np.asarray(whole()), truth)
    routing, _ = layer_calls.pick(layer, x)
    programs = _parts(layer, x, routing)
    sent = bytes_sent(np.asarray(routing.ids), layer.config, layer.layout)
    bare = {name: ep_calls.all_to_all_program(mesh, amount) for name, amount in dataclasses.asdict(sent).items()}
    return EpResult(
        case,
        transport,
        explain("grouped_matmul", implementation=layer.implementation, w=layer.w13.get_value()).chosen,
        {name: stopwatch.time(program) for name, program in programs.items()},
        {name: stopwatch.time(program) for name, program in bare.items()},
        sent,
        stopwatch.time(whole),
        one_device,
        error,
    )


def relative_error(found: np.ndarray, truth: np.ndarray) -> float:
    """Relative L2, in float64."""
    wide = truth.astype(np.float64)
    return float(np.linalg.norm(found.astype(np.float64) - wide) / np.linalg.norm(wide))


def _parts(layer: MoE, x: Any, routing: Any) -> dict[str, Program]:
    dispatch = ep_calls.dispatch_program(layer, ep_calls.latent_rows(layer, x), routing)
    arrived = dispatch()
    experts = ep_calls.experts_program(layer, arrived)
    return dict(zip(PARTS, (dispatch, experts, ep_calls.combine_program(layer, experts(), arrived)), strict=True))
