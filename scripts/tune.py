"""Searches the Hopper kernel's tunings on a Hopper GPU, against the one that the heuristic picks.

python scripts/tune.py --op w13 --recipe w4a16 --rows 128,2048 --json tuned.json

Candidates are the splits of a block's rows of N over warpgroups, stage depths and row tiles that fit the shape; with
`--together` calls of several launches, which share the groups out by what a tile at each of their widths was measured
to cost. All are timed as `k3jax bench` times, a few times on every distribution of the rows, the best of them then more
often, in turn. The winner has the least sum over the distributions, or one that is within 1 % of it and the faster on
its slowest distribution; it is one that takes at most a quarter more on that than on its fastest, if any does. The JSON
is a list of objects with `op, recipe, groups, rows, n, k, mma, gated, tuning, us` (by distribution), `heuristic,
device, jax, date`, the winner of a case first. `--winners FILE` puts the winner of each case into a file such as
`pallas_kernels/grouped_matmul/tunings.json`. Several searches may share a GPU: each times while it holds `--lock FILE`.
"""

import concurrent.futures
import contextlib
import dataclasses
import datetime
import fcntl
import functools
import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from rich.console import Console

from k3jax.bench.calls import KIMI, make_experts, make_rows, quantized_rows, relative_error
from k3jax.bench.cases import GEMMS, Case
from k3jax.bench.results import ERROR_LIMITS
from k3jax.bench.timing import device_times
from pallas_kernels import MXFP4Array
from pallas_kernels.grouped_matmul import tuned
from pallas_kernels.grouped_matmul.config import (
    SHARED_MEMORY,
    Tuning,
    choose_tuning,
    mean_group,
    row_widths,
    shared_memory,
)
from pallas_kernels.grouped_matmul.kernel_layout import RECIPES, KernelWeights, Mma, to_kernel_layout
from pallas_kernels.grouped_matmul.mosaic_hopper import grouped_matmul
from pallas_kernels.grouped_matmul.schedule import Prices, group_cost

_NARROW = 40  # rows a group up to which a tile has one width, and four warpgroups may share a block
_SPLITS = {  # (warpgroups, units of each), of tiles that are narrow or not
    True: ((4, 1), (2, 2), (3, 1), (2, 1), (4, 2), (1, 1), (3, 2), (4, 3)),
    False: ((2, 2), (3, 1), (2, 1), (4, 1)),
}
_LIMITS = (168, 152, 136, 120, 104, 80)  # of a row tile
_WIDE = 152  # a tile for the large groups among small ones
_MOST_WIDTHS = 3
_MOST_STAGES = 10
_FINALISTS = 3
_PROMISING = 14  # calls of several launches that are compiled
_AS_GOOD = 1.01
_SKEWED = 1.25  # of the time on another distribution
_ROUGHLY = 4  # times that each of many is timed
_LAUNCH_US = 12  # that a launch more takes: its first copies, and its last wave of tiles
Launch = tuple[tuple[int, ...], int, int, int]  # widths, warpgroups, units of each, units of K in a stage
# Launches that a call may have, those for the largest groups first; of each kind one or, but of the first, none.
_LAUNCHES: dict[Mma, tuple[tuple[Launch, ...], ...]] = {
    "bf16": (
        ((tuple(range(24, 153, 16)), 2, 2, 2), (tuple(range(16, 81, 16)), 4, 1, 2)),
        ((tuple(range(16, 81, 16)), 4, 1, 2), (tuple(range(16, 81, 16)), 2, 2, 2)),
        (((40,), 4, 1, 4), ((24, 40), 4, 2, 2), ((24, 40), 4, 1, 4)),
        (((24,), 4, 2, 2), ((24,), 4, 1, 4)),
    ),
    "e4m3": (
        (((152,), 2, 1, 4), ((136,), 2, 1, 4), ((120,), 2, 2, 4), ((104,), 2, 2, 4)),
        (((120,), 2, 2, 4), ((104,), 2, 2, 4), ((96,), 2, 2, 4)),
        (((80,), 2, 2, 4), ((80,), 3, 1, 4), ((64,), 2, 2, 4)),
        (((40,), 4, 1, 4), ((32,), 4, 1, 4), ((24,), 4, 1, 4), ((24,), 4, 2, 2)),
    ),
}


def candidates(case: Case) -> list[Tuning]:
    """Every tuning worth timing, the heuristic's first; each can run."""
    assert case.groups is not None
    mma, gated = RECIPES[case.recipe], case.op == "w13"
    mean = mean_group(case.rows, case.groups)
    found = [choose_tuning(case.rows, case.groups, case.columns, case.depth, mma, gated)]
    for widths in _row_tiles(mean, mma):
        for warpgroups, units, k_units in _shapes(widths[-1], mma):
            tuning = _with_most_stages(Tuning(widths, warpgroups, units, k_units, 2), mma, gated, case.groups)
            fits = tuning.reason_against(case.columns, case.depth, mma, gated, case.groups) is None
            if fits and tuning not in found:
                found.append(tuning)
    return found


def together(cases: list[Case], w: KernelWeights, jobs: int, lock: Any) -> list[Tuning]:
    """The tuning that a call gets now, and the calls of several launches that promise most.

    What a tile of each launch costs at each of its widths is measured here; it says how groups are shared out, and so
    what a call of some launches takes.
    """
    case = cases[0]
    assert case.groups is not None
    mma, gated = RECIPES[case.recipe], case.op == "w13"

    def fitting(launches: Iterable[Launch]) -> list[Tuning]:
        tunings = [_with_most_stages(Tuning(*launch, 2), mma, gated, w.shape[0]) for launch in launches]
        return [
            each for each in tunings if each.reason_against(case.columns, case.depth, mma, gated, w.shape[0]) is None
        ]

    kinds = [fitting(launches) for launches in _LAUNCHES[mma]]
    launches = list(dict.fromkeys(itertools.chain(*kinds)))
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        calls = list(pool.map(functools.partial(_full_tiles, case, w), launches))
    with lock():
        us = iter(_device_us(list(itertools.chain(*calls)), _ROUGHLY))
    costs = {each: tuple(max(1, round(100 * next(us) / w.shape[0])) for _ in each.widths) for each in launches}
    found = []
    for choice in itertools.product(kinds[0], *([None, *kind] for kind in kinds[1:])):
        asked = [dataclasses.replace(each, costs=costs[each]) for each in choice if each is not None]
        if len(set(asked)) == len(asked) > 1:
            found.append(dataclasses.replace(asked[0], others=tuple(asked[1:])))
    found.sort(key=lambda tuning: sum(_predicted_us(case.group_sizes, tuning) for case in cases))
    now = tuned.choose(case.rows, case.groups, case.columns, case.depth, mma, gated).tuning
    return list(dict.fromkeys([now, *found[:_PROMISING]]))


def _predicted_us(sizes: Iterable[int], tuning: Tuning) -> float:
    prices = [Prices(launch.widths, launch.costs) for launch in tuning.launches]
    tiles = sum(min(group_cost(int(size), each) for each in prices) for size in sizes)
    return tiles / 100 + _LAUNCH_US * len(prices)


def _full_tiles(case: Case, w: KernelWeights, tuning: Tuning) -> list[Callable[[], Any]]:
    """For each width a call in which each expert has the rows of one tile that is full at it."""
    groups = w.shape[0]
    full = dataclasses.replace(case, rows=tuning.widest * groups, distribution="uniform")
    x = quantized_rows(full, make_rows(full))
    sizes = [jnp.full(groups, width, jnp.int32) for width in tuning.widths]
    program = _compiled(full, w, tuning, x, sizes[0])
    return [functools.partial(program, x, w, each) for each in sizes]


def _compiled(case: Case, w: KernelWeights, tuning: Tuning, x: Any, sizes: Any) -> Any:
    call = functools.partial(grouped_matmul, activation=KIMI if case.op == "w13" else None, tuning=tuning)
    return jax.jit(call).lower(x, w, sizes).compile()


def _row_tiles(mean: int, mma: Mma) -> list[tuple[int, ...]]:
    """Those of a mean group in one tile or several and, for skewed groups, wider ones."""
    found = list(dict.fromkeys(row_widths(mean, limit, mma) for limit in _LIMITS))[:_MOST_WIDTHS]
    own = found[0][-1]
    return found + ([(own // 16 * 8, own, _WIDE)] if _NARROW < own < _WIDE else [])


def _shapes(widest: int, mma: Mma) -> Iterator[tuple[int, int, int]]:
    """(warpgroups, units of each, units of K in a stage)"""
    splits = _SPLITS[widest <= _NARROW]
    depths = ((2, 4) if mma == "e4m3" else (1, 2, 4, 8)) if widest <= _NARROW else (2, 1, 4)
    return ((*split, k_units) for split in splits for k_units in depths)


def _with_most_stages(tuning: Tuning, mma: Mma, gated: bool, groups: int) -> Tuning:
    for stages in range(_MOST_STAGES, 2, -1):
        deeper = dataclasses.replace(tuning, stages=stages)
        if shared_memory(deeper, mma, gated, groups) <= SHARED_MEMORY:
            return deeper
    return tuning


def time_cases(
    cases: list[Case],
    experts: MXFP4Array,
    w: KernelWeights,
    tunings: list[Tuning],
    rounds: int,
    jobs: int,
    lock: Any,
) -> list[dict[str, Any]]:
    """A record for each of the best tunings and for the first, the winner first.

    The cases differ in the distribution of their rows; `w` is `experts` as the kernel lays them out. Of each result the
    busiest expert's rows are checked.
    """
    first = cases[0]
    x = quantized_rows(first, make_rows(first))
    sizes = {str(case.distribution): jnp.asarray(case.group_sizes) for case in cases}

    def compiled(tuning: Tuning) -> Any:
        return _compiled(first, w, tuning, x, next(iter(sizes.values())))

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        programs = dict(zip(tunings, pool.map(compiled, tunings), strict=True))

    def timed(some: list[Tuning], repeats: int) -> list[dict[str, float]]:
        calls = [functools.partial(programs[tuning], x, w, each) for tuning in some for each in sizes.values()]
        us = iter(_device_us(calls, repeats))
        return [{name: next(us) for name in sizes} for _ in some]

    with lock():
        rough = dict(zip(tunings, timed(tunings, _ROUGHLY), strict=True))
        best = sorted(tunings, key=lambda tuning: sum(rough[tuning].values()))[:_FINALISTS]
        finalists = list(dict.fromkeys([*best, tunings[0]]))
        for tuning, case in itertools.product(finalists, cases):
            error = relative_error(case, x, experts, programs[tuning](x, w, sizes[str(case.distribution)]))
            assert error <= ERROR_LIMITS[case.recipe], f"{tuning} is off by {error}, of {case}"
        records = [_record(first, w, *found) for found in zip(finalists, timed(finalists, rounds), strict=True)]
    return ranked(records)


def ranked(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The winner first: of those as good as the fastest, the one whose slowest distribution is the fastest.

    Only those count that take at most a quarter more on any distribution than on another, where there are any.
    """
    total = {id(record): sum(record["us"].values()) for record in records}
    fastest_first = sorted(records, key=lambda record: total[id(record)])
    steady = [record for record in fastest_first if max(record["us"].values()) <= _SKEWED * min(record["us"].values())]
    eligible = steady or fastest_first
    as_good = [record for record in eligible if total[id(record)] <= _AS_GOOD * total[id(eligible[0])]]
    winner = min(as_good, key=lambda record: max(record["us"].values()))
    return [winner, *(record for record in fastest_first if record is not winner)]


def _device_us(calls: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Of each call the median, by the method of `k3jax bench`."""
    return [statistics.median(times) for times in device_times(calls, repeats, warm_up=2)]


def _record(case: Case, w: KernelWeights, tuning: Tuning, us: dict[str, float]) -> dict[str, Any]:
    groups, n, k = w.shape
    heuristic = tuning == choose_tuning(case.rows, groups, n, k, w.mma, w.gated)
    return {
        **{name: getattr(case, name) for name in ("op", "recipe", "groups", "rows")},
        "n": n,
        "k": k,
        "mma": w.mma,
        "gated": w.gated,
        "tuning": dataclasses.asdict(tuning),
        "us": us,
        "heuristic": heuristic,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def write_winners(path: Path, winners: list[dict[str, Any]]) -> None:
    """Puts winners into the file, in the place of those for the same sizes."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    merged = {tuned.key(record): record for record in [*known, *winners]}
    path.write_text(json.dumps([merged[place] for place in sorted(merged)], indent=1) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _held(path: Path | None) -> Iterator[None]:
    if path is None:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tune(
    op: Annotated[str, typer.Option(help="Of w13 and w2, comma separated.")] = "w13,w2",
    recipe: Annotated[str, typer.Option(help="Of w4a16, w4a8 and w4a8_fp8, comma separated.")] = "w4a16,w4a8_fp8",
    rows: Annotated[str, typer.Option(help="Routed rows, comma separated.")] = "128,2048,16384,65536",
    groups: Annotated[int, typer.Option(min=1, help="Experts on the device.")] = 112,
    distribution: Annotated[str, typer.Option(help="Of uniform, zipf and hot, comma separated.")] = "uniform,zipf,hot",
    several: Annotated[bool, typer.Option("--together", help="Search calls of several launches.")] = False,
    rounds: Annotated[int, typer.Option(min=3, help="Times that the best are timed in turn.")] = 7,
    jobs: Annotated[int, typer.Option(min=1, help="Tunings compiled at a time.")] = 4,
    lock: Annotated[Path | None, typer.Option(help="File to hold while the GPU is timed.")] = None,
    winners: Annotated[Path | None, typer.Option(help="File of winners to bring up to date.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="File to write the records to.")] = None,
) -> None:
    """Search the Hopper kernel's tunings on this GPU, against the one that the heuristic picks."""
    console = Console()
    records: list[dict[str, Any]] = []
    for name in op.split(","):
        for each in recipe.split(","):
            if name not in GEMMS or each not in RECIPES:
                raise typer.BadParameter(f"{name} {each}: ops are {', '.join(GEMMS)}, recipes {', '.join(RECIPES)}")
            cases = [
                [Case(name, each, int(count), groups, part) for part in distribution.split(",")]
                for count in rows.split(",")
            ]
            with _held(lock):
                experts = make_experts(cases[0][0])
                w = jax.block_until_ready(to_kernel_layout(experts, recipe=each, gated=name == "w13"))
            for same in cases:
                held = functools.partial(_held, lock)
                tunings = together(same, w, jobs, held) if several else candidates(same[0])
                timed = time_cases(same, experts, w, tunings, rounds, jobs, held)
                records += timed
                present = next(record for record in timed if tuned.read_tuning(record) == tunings[0])
                for what, record in (("as it is" if several else "heuristic", present), ("best", timed[0])):
                    us = ", ".join(f"{part} {value:.1f} us" for part, value in record["us"].items())
                    console.print(f"{name} {each} {same[0].rows} rows, {what}: {us} with {tuned.read_tuning(record)}")
                if json_file is not None:
                    json_file.write_text(json.dumps(records, indent=1), encoding="utf-8")
                if winners is not None:
                    with _held(lock):
                        write_winners(winners, timed[:1])


if __name__ == "__main__":
    typer.run(tune)
