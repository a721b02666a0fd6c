"""Times the Hopper kernel's tunings on a Hopper GPU, against the one that the heuristic picks.

python scripts/tune.py --op w13 --recipe w4a16 --rows 128,2048 --json tuned.json

Candidates are every split of a block's rows of N over warpgroups, stage depth and set of widths that fits the shape;
each runs on random data with the L2 flushed. The JSON is a list of objects with `op, recipe, groups, rows,
distribution, tuning, us, us_min, us_max, heuristic, device, jax`, the fastest of a case first.
"""

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from rich.console import Console
from rich.progress import track

from k3jax.bench.calls import KIMI, make_experts, make_rows, quantized_rows
from k3jax.bench.cases import GEMMS, Case
from k3jax.bench.timing import Stopwatch
from pallas_kernels.grouped_matmul.config import SHARED_MEMORY, Tuning, choose_tuning, shared_memory
from pallas_kernels.grouped_matmul.kernel_layout import RECIPES, KernelWeights, to_kernel_layout
from pallas_kernels.grouped_matmul.mosaic_hopper import grouped_matmul

SPLITS = ((4, 1), (2, 2), (3, 1), (2, 1))  # warpgroups, units of each
_MOST_STAGES = 10


def candidates(case: Case) -> list[Tuning]:
    """Every tuning worth timing, the heuristic's first; each can run."""
    assert case.groups is not None
    mma, gated = RECIPES[case.recipe], case.op == "w13"
    chosen = choose_tuning(case.rows, case.groups, case.columns, case.depth, mma, gated)
    widths = {chosen.widths, chosen.widths[-1:], tuple(sorted({chosen.widest // 16 * 8 or 8, chosen.widest}))}
    found = [chosen]
    for some in sorted(widths):
        for tuning in _splits(some, mma, gated, case.groups):
            fits = tuning.reason_against(case.columns, case.depth, mma, gated, case.groups) is None
            if fits and tuning not in found:
                found.append(tuning)
    return found


def _splits(widths: tuple[int, ...], mma: Any, gated: bool, groups: int) -> Iterator[Tuning]:
    """The splits and stage depths, with as many stages as shared memory holds."""
    for warpgroups, units in SPLITS:
        for k_units in (1, 2, 4, 8):
            for stages in range(_MOST_STAGES, 1, -1):
                try:
                    tuning = Tuning(widths, warpgroups, units, k_units, stages)
                except ValueError:  # too many accumulators
                    break
                if shared_memory(tuning, mma, gated, groups) <= SHARED_MEMORY:
                    yield tuning
                    break


def time_case(case: Case, w: KernelWeights, stopwatch: Stopwatch) -> list[dict[str, Any]]:
    """A record for each candidate, the fastest first."""
    x = quantized_rows(case, make_rows(case))
    sizes = jnp.asarray(case.group_sizes)
    records = []
    tunings = candidates(case)
    for tuning in track(tunings, f"{case.op} {case.recipe} {case.rows} rows", transient=True):
        activation = KIMI if case.op == "w13" else None
        call = jax.jit(functools.partial(grouped_matmul, activation=activation, tuning=tuning))
        timing = stopwatch.measure(functools.partial(call, x, w, sizes))
        assert timing is not None
        records.append(
            {
                "op": case.op,
                "recipe": case.recipe,
                "groups": case.groups,
                "rows": case.rows,
                "distribution": case.distribution,
                "tuning": dataclasses.asdict(tuning),
                "us": timing.us,
                "us_min": timing.us_min,
                "us_max": timing.us_max,
                "heuristic": tuning == tunings[0],
                "device": jax.devices()[0].device_kind,
                "jax": jax.__version__,
            }
        )
    return sorted(records, key=lambda record: record["us"])


def tune(
    op: Annotated[str, typer.Option(help="Of w13 and w2, comma separated.")] = "w13,w2",
    recipe: Annotated[str, typer.Option(help="Of w4a16, w4a8 and w4a8_fp8, comma separated.")] = "w4a16,w4a8_fp8",
    rows: Annotated[str, typer.Option(help="Routed rows, comma separated.")] = "128,2048,16384,65536",
    groups: Annotated[int, typer.Option(min=1, help="Experts on the device.")] = 112,
    distribution: Annotated[str, typer.Option(help="uniform, zipf or hot.")] = "uniform",
    repeats: Annotated[int, typer.Option(min=3, help="Timed calls of each.")] = 10,
    json_file: Annotated[Path | None, typer.Option("--json", help="File to write the records to.")] = None,
) -> None:
    """Time the Hopper kernel's tunings on this GPU, against the one that the heuristic picks."""
    console = Console()
    stopwatch = Stopwatch(repeats, "device")
    records: list[dict[str, Any]] = []
    for name in op.split(","):
        for each in recipe.split(","):
            if name not in GEMMS or each not in RECIPES:
                raise typer.BadParameter(f"{name} {each}: ops are {', '.join(GEMMS)}, recipes {', '.join(RECIPES)}")
            cases = [Case(name, each, int(count), groups, distribution) for count in rows.split(",")]
            w = to_kernel_layout(make_experts(cases[0]), recipe=each, gated=name == "w13")
            for case in cases:
                timed = time_case(case, w, stopwatch)
                records += timed
                best = timed[0]
                chosen = next(record for record in timed if record["heuristic"])
                console.print(
                    f"{name} {each} {case.rows} rows: heuristic {chosen['us']:.1f} us, best {best['us']:.1f} us with "
                    f"{Tuning(**best['tuning'])}"
                )
                if json_file is not None:
                    json_file.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    typer.run(tune)
