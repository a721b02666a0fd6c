"""The figures of `k3jax bench --op layer`: the whole layer, its routed path and its stages, beside their floors."""

import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np

from k3jax.bench import layer_calls
from k3jax.bench.layer_cases import GEMM_STAGES, LayerCase, Work, layer_work, routed_work, stage_work
from k3jax.bench.timing import Stopwatch, Timing
from pallas_kernels import explain


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the layer timed as a program of its own, what it has to do, and its floor in microseconds."""

    timing: Timing
    work: Work
    floor_us: float


@dataclasses.dataclass(frozen=True)
class LayerResult:
    """One case's figures; microseconds are medians.

    Attributes:
        whole, routed: the layer, and its part from ids and weights to the experts' bfloat16 sums.
        stages: those that were timed; the two products always are.
        read: the read bandwidth of this run, bytes a second.
        experts_hit, rows_max: experts that have rows, and the most rows that one has.
        compile_s: seconds that compiling the whole layer took.
        peers: others' figures of the routed path, by their name in the JSON; empty where none were asked for.
    """

    case: LayerCase
    implementation: str
    whole: Stage
    routed: Stage
    stages: dict[str, Stage]
    read: float
    experts_hit: int
    rows_max: int
    compile_s: float
    peers: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def gemm_us(self) -> float:
        """The two grouped products, each on rows that are there in its format, to bfloat16."""
        return sum(self.stages[name].timing.us for name in GEMM_STAGES)

    @property
    def routed_ratio(self) -> float:
        """The routed path over its two products."""
        return self.routed.timing.us / self.gemm_us

    @property
    def weight_share(self) -> float:
        """Of the read bandwidth: what the bytes of all weights that the layer needs make of it."""
        return self.whole.work.weight_bytes / self.whole.timing.us * 1e6 / self.read

    @property
    def ok(self) -> bool:
        return True  # it is `w13` and `w2` whose results are checked

    def flat(self) -> dict[str, Any]:
        """As an object of the JSON."""
        case = dataclasses.asdict(self.case)
        return {
            "op": self.case.op,
            "implementation": self.implementation,
            **case,
            "experts_hit": self.experts_hit,
            "rows_max": self.rows_max,
            **_flat(self.whole),
            "timer": self.whole.timing.timer,
            "compile_s": self.compile_s,
            "weight_bytes": self.whole.work.weight_bytes,
            "weight_share": self.weight_share,
            "routed_us": self.routed.timing.us,
            "routed_floor_us": self.routed.floor_us,
            "gemm_us": self.gemm_us,
            "routed_ratio": self.routed_ratio,
            "stages": {name: _flat(stage) for name, stage in self.stages.items()},
            **self.peers,
        }


def timed(
    cases: tuple[LayerCase, ...],
    implementation: str | None,
    breakdown: bool,
    stopwatch: Stopwatch,
    ceilings: dict[str, float],
) -> Iterator[LayerResult]:
    """Results of cases of one layer. With `breakdown` every stage is timed, else the two products alone."""
    layer = layer_calls.make_layer(cases[0], implementation)
    runs = explain("grouped_matmul", implementation=implementation, w=layer.w13.get_value()).chosen
    for case in cases:
        x = layer_calls.make_tokens(case, layer)
        routing, rows = layer_calls.pick(layer, x)
        hit = int(np.count_nonzero(rows))

        def stage(program: layer_calls.Program, work: Work, recipe: str = case.recipe) -> Stage:
            return Stage(stopwatch.time(program), work, work.floor_us(recipe, ceilings))

        program = layer_calls.layer_program(layer, x)
        whole = stage(program, layer_work(case, hit))
        routed = stage(layer_calls.routed_program(layer, x, routing), routed_work(case, hit))
        work, stages = stage_work(case, hit), {}
        for name, one in layer_calls.stage_programs(layer, x, routing, all_of_them=breakdown):
            if breakdown or name in GEMM_STAGES:
                stages[name] = stage(one, work[name])
        most = int(rows.max())
        yield LayerResult(case, runs, whole, routed, stages, ceilings["read"], hit, most, program.compile_s)
    del layer
    gc.collect()


def _flat(stage: Stage) -> dict[str, Any]:
    timing, work = stage.timing, stage.work
    return {
        **{name: getattr(timing, name) for name in ("us", "us_min", "us_max")},
        "floor_us": stage.floor_us,
        "bytes": work.bytes,
        "flop": work.flop,
    }
