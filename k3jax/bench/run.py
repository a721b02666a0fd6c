"""One run of `k3jax bench`: cases, the device's ceilings measured beside them, and a result for each case."""

import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.bench import calls, layer_run
from k3jax.bench.cases import DISTRIBUTIONS, GEMMS, GROUPS, HIDDEN, OPS, PICKS, RATES, RECIPES, ROWS, WIDTH, Case
from k3jax.bench.layer_cases import MODEL, SHARED, TOKENS, LayerCase
from k3jax.bench.layer_run import LayerResult
from k3jax.bench.peers import Peers
from k3jax.bench.timing import CEILINGS, Stopwatch, Timer, Timing, default_timer, measure_ceiling
from k3jax.experts import RECIPES as EXPERT_RECIPES
from pallas_kernels import explain

Progress = Callable[[int, int, str], None]

XLA_LIMIT = 1.0  # seconds of one call beyond which the `xla` implementation is not worth timing
ERROR_LIMITS = {"bf16": 2e-3, "w4a16": 2e-3, "w4a8": 3e-3, "w4a8_fp8": 3e-3}  # relative L2
_QUANTIZERS = {"w4a8": "quantize_mxfp8", "w4a8_fp8": "quantize_fp8_token"}
_MOVES = {"schedule": "schedule_rows", "gather": "gather_rows", "combine": "combine_rows"}
_PLAIN = {"situ": "situ_and_mul", **_MOVES}  # ops without recipes
_OP_RECIPES: dict[str, tuple[str, ...]] = {**dict.fromkeys((*GEMMS, "layer"), RECIPES)}
_OP_RECIPES |= {"quantize": ("w4a8", "w4a8_fp8")} | dict.fromkeys(_PLAIN, ("bf16",))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What to time.

    Attributes:
        recipes: None for those of each op that keep experts in MXFP4.
        implementation: None for the fastest that runs here.
        compare_xla: whether to time the `xla` implementation beside another.
        peers: whether to time Humming, in a process of `peer_python`, and tokamax.
        picks: of a token, for "schedule", "gather", "combine" and "layer".
        tokens, model, shared, breakdown: of op "layer" alone: its sizes, see `LayerCase`, and whether to time every
            stage.
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
    breakdown: bool = False


@dataclasses.dataclass(frozen=True)
class Result:
    """One case's figures; microseconds are medians, None is what was not timed.

    Attributes:
        tbs: TB/s of the weights of experts that have rows; of all bytes, where there are no weights.
        roof_us: no version can be faster, by the ceilings of this run.
        error: relative L2 of some rows against the recipe's product in float32.
        from_bf16_us: the same op with the quantisation of its rows inside.
        quantized_out_us: the same op with its result quantised for the next product.
        xla_us: the `xla` implementation on the same rows.
        compile_s: seconds that compiling the op took.
        peers: others' figures, by their name in the JSON; empty where none were asked for.
    """

    case: Case
    implementation: str
    timing: Timing
    roof_us: float
    compile_s: float
    error: float | None = None
    from_bf16_us: float | None = None
    quantized_out_us: float | None = None
    xla_us: float | None = None
    peers: dict[str, float | None] = dataclasses.field(default_factory=dict)

    @property
    def tflops(self) -> float | None:
        return self.case.flop / self.timing.us / 1e6 if self.case.flop else None

    @property
    def tbs(self) -> float:
        return (self.case.weight_bytes or self.case.bytes) / self.timing.us / 1e6

    @property
    def ok(self) -> bool:
        """Whether what was timed is also right."""
        return self.error is None or self.error <= ERROR_LIMITS[self.case.recipe]


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


def plan(request: Request) -> tuple[Case | LayerCase, ...]:
    """The cases of a request, op by op and recipe by recipe.

    Raises:
        ValueError: a name is unknown, a number is too small, or no recipe fits an op.
        NotImplementedError: the named implementation cannot run an op.
    """
    _require_names("op", request.ops, OPS)
    _require_names("recipe", request.recipes or (), RECIPES)
    _require_names("distribution", request.distributions, DISTRIBUTIONS)
    numbers = {"rows": min(request.rows), "groups": request.groups, "repeats": request.repeats}
    numbers |= {"tokens": min(request.tokens), "model": request.model, "picks": request.picks}
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if _MOVES.keys() & set(request.ops) and any(rows % request.picks for rows in request.rows):
        raise ValueError(f"rows={request.rows} must be multiples of picks={request.picks}, a token's rows")
    if "layer" in request.ops and request.picks > request.groups:
        raise ValueError(f"picks={request.picks} of a token exceed groups={request.groups}: they are distinct experts")
    if request.ops == ("layer",) and request.distributions != ("uniform",):
        raise ValueError("op layer spreads picks evenly: --distribution is for w13 and w2")
    for name, size in (("hidden", request.hidden), ("width", request.width)):
        if size < 32 or size % 32:
            raise ValueError(f"{name}={size} must be a multiple of 32, the length of a block")
    cases = tuple(case for op in request.ops for case in _cases(request, op))
    for case in cases:
        choose(case, request.implementation)
    return cases


def choose(case: Case | LayerCase, implementation: str | None) -> str:
    """The implementation that would run a case on experts in the layout that this one wants.

    Raises:
        NotImplementedError: the named implementation cannot run it.
    """
    weights = None
    product = isinstance(case, LayerCase) or case.op in GEMMS
    if case.recipe == "bf16" and product:  # plain: there is no layout to choose
        weights = jax.ShapeDtypeStruct((case.groups, 2 * case.width, case.hidden), jnp.bfloat16)
    op = "grouped_matmul" if product else _PLAIN.get(case.op) or _QUANTIZERS[case.recipe]
    return explain(op, implementation=implementation, w=weights).chosen


def run(
    request: Request,
    cases: tuple[Case | LayerCase, ...],
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
    return [(result.flat() if isinstance(result, LayerResult) else _flat(result)) | machine for result in run.results]


def roof_us(case: Case, ceilings: dict[str, float]) -> float:
    """Microseconds below which no version of a case can get: of its bytes or of its operations, the longer."""
    if case.op not in GEMMS:
        return case.bytes / ceilings["copy"] * 1e6
    return max(case.bytes / ceilings["read"], case.flop / ceilings[RATES[case.recipe]]) * 1e6


def _cases(request: Request, op: str) -> Iterator[Case | LayerCase]:
    possible = _OP_RECIPES[op]
    recipes = possible if op not in (*GEMMS, "layer") else RECIPES[1:]
    if request.recipes is not None and op not in _PLAIN:
        recipes = tuple(recipe for recipe in request.recipes if recipe in possible)
        if not recipes:
            raise ValueError(f"op {op} has the recipes {', '.join(possible)}, not {', '.join(request.recipes)}")
    grouped = op in GEMMS
    for recipe in recipes:
        if op == "layer":
            sizes = {name: getattr(request, name) for name in ("groups", "picks", "model", "hidden", "width", "shared")}
            yield from (LayerCase(recipe, tokens, **sizes, seed=request.seed) for tokens in request.tokens)
            continue
        for distribution in request.distributions if grouped else (None,):
            for rows in request.rows:
                groups = request.groups if grouped else None
                lengths = request.hidden, request.width
                yield Case(op, recipe, rows, groups, distribution, *lengths, request.seed, request.picks)


def _beside_peers(result: Result | LayerResult, peers: Peers) -> Result | LayerResult:
    if isinstance(result, LayerResult):
        return dataclasses.replace(result, peers=peers.layer_figures(result.case))
    return dataclasses.replace(result, peers=peers.figures(result.case))


def _timed(
    cases: tuple[Any, ...], request: Request, stopwatch: Stopwatch, ceilings: dict[str, float]
) -> Iterator[Result | LayerResult]:
    """Results of cases that share an op and a recipe, so the experts too."""
    first = cases[0]
    if isinstance(first, LayerCase):
        yield from layer_run.timed(cases, request.implementation, request.breakdown, stopwatch, ceilings)
        return
    if first.op not in GEMMS:
        implementation = choose(first, request.implementation)
        for case in cases:
            rows = calls.make_rows(case)
            call = calls.elementwise_call(case, rows, implementation)
            xla_us = None
            if implementation != "xla" and request.compare_xla:
                xla_us = stopwatch.time(calls.elementwise_call(case, rows, "xla")).us
            roof = roof_us(case, ceilings)
            yield Result(case, implementation, stopwatch.time(call), roof, call.compile_s, xla_us=xla_us)
        return
    experts = calls.make_experts(first)
    weights = calls.expert_weights(experts, first, request.implementation)
    implementation = explain("grouped_matmul", implementation=request.implementation, w=weights).chosen
    plain = calls.expert_weights(experts, first, "xla") if implementation != "xla" and request.compare_xla else None
    for case in cases:
        rows = calls.make_rows(case)
        x = calls.quantized_rows(case, rows)
        call = calls.product_call(case, x, weights, implementation=implementation)
        error = calls.relative_error(case, x, experts, call())
        timing, roof = stopwatch.time(call), roof_us(case, ceilings)
        from_bf16, quantized_out = _quantized(case, rows, x, weights, implementation, stopwatch)
        xla = None
        if plain is not None:
            xla_call = calls.product_call(case, x, plain, implementation="xla")
            xla = stopwatch.measure(xla_call, limit=XLA_LIMIT)
        xla_us = None if xla is None else xla.us
        yield Result(case, implementation, timing, roof, call.compile_s, error, from_bf16, quantized_out, xla_us)
    del experts, weights, plain
    gc.collect()


def _quantized(
    case: Case, rows: Any, x: Any, weights: Any, implementation: str, stopwatch: Stopwatch
) -> tuple[float | None, float | None]:
    """Microseconds of a quantised recipe's variants: from bfloat16 rows, and of w13 to quantised rows."""
    recipe = EXPERT_RECIPES[case.recipe]
    if recipe.quantize is None:
        return None, None
    product = functools.partial(calls.product_call, case, w=weights, implementation=implementation)
    from_bf16 = stopwatch.time(product(x=rows, quantize=True)).us
    if case.op != "w13":
        return from_bf16, None
    return from_bf16, stopwatch.time(product(x=x, out_format=recipe.hidden_format)).us


def _ceilings(cases: tuple[Case | LayerCase, ...]) -> list[str]:
    wanted = {"copy" for case in cases if case.op not in GEMMS}
    for case in cases:
        if case.op in (*GEMMS, "layer"):
            wanted |= {"read", RATES[case.recipe]}
        if case.op == "layer":
            wanted.add("bf16")  # its dense products
    return [name for name in CEILINGS if name in wanted]


def _flat(result: Result) -> dict[str, Any]:
    case = result.case
    return {
        "op": case.op,
        "recipe": case.recipe,
        "implementation": result.implementation,
        "groups": case.groups,
        "rows": case.rows,
        "distribution": case.distribution,
        **{name: getattr(result.timing, name) for name in ("us", "us_min", "us_max")},
        **{name: getattr(result, name) for name in ("tflops", "tbs", "roof_us", "error")},
        **{name: getattr(result, name) for name in ("from_bf16_us", "quantized_out_us", "xla_us")},
        "compile_s": result.compile_s,
        "timer": result.timing.timer,
        "hidden": case.hidden,
        "width": case.width,
        "experts_hit": int(np.count_nonzero(case.group_sizes)) if case.op in GEMMS else None,
        "seed": case.seed,
        **result.peers,
    }


def _require_names(what: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{what} {name!r} is not one of {', '.join(known)}")
