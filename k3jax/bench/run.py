"""One run of `k3jax bench`: cases, the device's ceilings measured beside them, and a result for each case."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from k3jax.bench import dense_run, layer_run, routed_run
from k3jax.bench.cases import DISTRIBUTIONS, GEMMS, GROUPS, HIDDEN, OPS, PICKS, RATES, RECIPES, ROWS, WIDTH, Case
from k3jax.bench.dense_cases import DENSE_OPS, INTERMEDIATE, DenseCase
from k3jax.bench.layer_cases import MODEL, SHARED, TOKENS, LayerCase
from k3jax.bench.layer_run import LayerResult
from k3jax.bench.peers import Peers
from k3jax.bench.results import Result
from k3jax.bench.timing import CEILINGS, Stopwatch, Timer, default_timer, measure_ceiling

Progress = Callable[[int, int, str], None]

AnyCase = Case | DenseCase | LayerCase

_OP_RECIPES: dict[str, tuple[str, ...]] = {**dict.fromkeys((*GEMMS, "layer"), RECIPES)}
_OP_RECIPES |= {"quantize": ("w4a8", "w4a8_fp8")} | dict.fromkeys((*routed_run.PLAIN, *DENSE_OPS), ("bf16",))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What to time.

    Attributes:
        recipes: None for those of each op that keep experts in MXFP4.
        implementation: None for the fastest that runs here.
        compare_xla: whether to time the `xla` implementation beside another, and `jnp.dot` beside dense products.
        peers: whether to time Humming, in a process of `peer_python`, and tokamax.
        picks: of a token, for "schedule", "gather", "combine" and "layer".
        model, shared: of op "layer" and the dense products: see `LayerCase` and `DenseCase`. intermediate: of the
            latter alone.
        tokens, breakdown: of op "layer" alone: how many, and whether to time every stage.
    """

    ops: tuple[str, ...] = GEMMS
    recipes: tuple[str, ...] | None = None
    rows: tuple[int, ...] = ROWS
    groups: int = GROUPS
    distributions: tuple[str, ...] = ("uniform",)
    hidden: int = HIDDEN
    width: int = WIDTH
    implementation: str | None = None
    compare_xla: bool = True
    peers: bool = False
    peer_python: Path | None = None
    repeats: int = 30
    timer: Timer | None = None
    seed: int = 0
    tokens: tuple[int, ...] = TOKENS
    model: int = MODEL
    picks: int = PICKS
    shared: int = SHARED
    intermediate: int = INTERMEDIATE
    breakdown: bool = False


@dataclasses.dataclass(frozen=True)
class Run:
    """All results, and what they were measured with. `notes` say what could not be timed, and why."""

    device: str
    jax: str
    timer: Timer
    ceilings: dict[str, float]
    results: tuple[Result | LayerResult, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return all(result.ok for result in self.results)


def plan(request: Request) -> tuple[AnyCase, ...]:
    """The cases of a request, op by op and recipe by recipe.

    Raises:
        ValueError: a name is unknown, a number is too small, or no recipe fits an op.
        NotImplementedError: the named implementation cannot run an op.
    """
    _require_names("op", request.ops, (*OPS, *DENSE_OPS))
    _require_names("recipe", request.recipes or (), RECIPES)
    _require_names("distribution", request.distributions, DISTRIBUTIONS)
    _require_sizes(request)
    if not set(GEMMS) & set(request.ops) and request.distributions != ("uniform",):
        raise ValueError(f"--distribution is for w13 and w2, not for {', '.join(request.ops)}")
    cases = tuple(case for op in request.ops for case in _cases(request, op))
    for case in cases:
        (dense_run if isinstance(case, DenseCase) else routed_run).choose(case, request.implementation)
    return cases


def run(
    request: Request,
    cases: tuple[AnyCase, ...],
    progress: Progress = lambda done, total, what: None,
    keep: Callable[[Run], None] = lambda so_far: None,
) -> Run:
    """Times the cases one after the other. `keep` gets all results so far after each one: a long run may be cut short.

    Raises:
        NotImplementedError: the implementation cannot take these weights.
        OSError: the GPU's profile does not show the calls.
    """
    peers = Peers(cases if request.peers else ())
    progress(0, len(cases), "Humming" if request.peers else "")
    peers.time_humming(request.peer_python)  # first: it needs memory that JAX would keep for itself
    stopwatch = Stopwatch(request.repeats, request.timer or default_timer())
    progress(0, len(cases), "the device's ceilings")
    ceilings = {name: measure_ceiling(name, stopwatch) for name in _ceilings(cases)}
    peers.time_tokamax(stopwatch)
    device = jax.devices()[0].device_kind
    so_far = Run(device, jax.__version__, stopwatch.timer, ceilings, (), tuple(peers.notes))
    for _, same in itertools.groupby(cases, lambda case: (case.op, case.recipe)):
        for result in _timed(tuple(same), request, stopwatch, ceilings):
            if request.peers:
                result = _beside_peers(result, peers)
            so_far = dataclasses.replace(so_far, results=(*so_far.results, result))
            progress(len(so_far.results), len(cases), f"{result.case.op} {result.case.recipe}")
            keep(so_far)
    return dataclasses.replace(so_far, notes=tuple(peers.notes))


def as_json(run: Run) -> list[dict[str, Any]]:
    """One object a case."""
    machine = {"device": run.device, "jax": run.jax, "ceilings": run.ceilings}
    return [result.flat() | machine for result in run.results]


def _cases(request: Request, op: str) -> Iterator[AnyCase]:
    def sizes(*names: str) -> dict[str, int]:
        return {name: getattr(request, name) for name in (*names, "hidden", "width", "seed")}

    grouped = op in GEMMS
    for recipe in _recipes(request, op):
        if op == "layer":
            of_layer = sizes("groups", "picks", "model", "shared")
            yield from (LayerCase(recipe, tokens, **of_layer) for tokens in request.tokens)
        elif op in DENSE_OPS:
            of_products = sizes("model", "shared", "intermediate")
            yield from (DenseCase(op, rows, **of_products) for rows in request.rows)
        else:
            groups = request.groups if grouped else None
            for distribution in request.distributions if grouped else (None,):
                for rows in request.rows:
                    yield Case(op, recipe, rows, groups, distribution, **sizes("picks"))


def _recipes(request: Request, op: str) -> tuple[str, ...]:
    possible = _OP_RECIPES[op]
    if request.recipes is None or op in routed_run.PLAIN:
        return RECIPES[1:] if possible == RECIPES else possible
    wanted = tuple(recipe for recipe in request.recipes if recipe in possible)
    if not wanted:
        raise ValueError(f"op {op} has the recipes {', '.join(possible)}, not {', '.join(request.recipes)}")
    return wanted


def _beside_peers(result: Result | LayerResult, peers: Peers) -> Result | LayerResult:
    if isinstance(result, LayerResult):
        return dataclasses.replace(result, peers=peers.layer_figures(result.case))
    return dataclasses.replace(result, peers=peers.figures(result.case))


def _timed(
    cases: tuple[Any, ...], request: Request, stopwatch: Stopwatch, ceilings: dict[str, float]
) -> Iterator[Result | LayerResult]:
    """Results of cases that share an op and a recipe."""
    asked = request.implementation
    if isinstance(cases[0], LayerCase):
        return layer_run.timed(cases, asked, request.breakdown, stopwatch, ceilings)
    one_kind = dense_run if isinstance(cases[0], DenseCase) else routed_run
    return one_kind.timed(cases, asked, request.compare_xla, stopwatch, ceilings)


def _ceilings(cases: tuple[AnyCase, ...]) -> list[str]:
    wanted: set[str] = set()
    for case in cases:
        if isinstance(case, LayerCase):
            wanted |= {"read", "copy", "bf16", RATES[case.recipe]}  # bf16: its dense products
        else:
            wanted |= {"read", RATES[case.recipe]} if case.flop else {"copy"}
    return [name for name in CEILINGS if name in wanted]


def _require_sizes(request: Request) -> None:
    numbers = {"rows": min(request.rows), "groups": request.groups, "repeats": request.repeats}
    numbers |= {"tokens": min(request.tokens), "model": request.model, "picks": request.picks}
    numbers["intermediate"] = request.intermediate
    if {"shared_gate_up", "shared_down"} & set(request.ops):
        numbers["shared"] = request.shared
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if routed_run.MOVES.keys() & set(request.ops) and any(rows % request.picks for rows in request.rows):
        raise ValueError(f"rows={request.rows} must be multiples of picks={request.picks}, a token's rows")
    if "layer" in request.ops and request.picks > request.groups:
        raise ValueError(f"picks={request.picks} of a token exceed groups={request.groups}: they are distinct experts")
    for name, size in (("hidden", request.hidden), ("width", request.width)):
        if size < 32 or size % 32:
            raise ValueError(f"{name}={size} must be a multiple of 32, the length of a block")


def _require_names(what: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{what} {name!r} is not one of {', '.join(known)}")
