"""What `k3jax bench` prints."""

import itertools

from rich.console import Console
from rich.table import Table
from rich.text import Text

from k3jax.bench.cases import Case
from k3jax.bench.dense_cases import DenseCase
from k3jax.bench.layer_console import layer_tables
from k3jax.bench.layer_run import LayerResult
from k3jax.bench.results import ERROR_LIMITS, Result
from k3jax.bench.run import Run
from k3jax.bench.tables import short, table, us

_UNITS = {"read": "TB/s", "copy": "TB/s", "bf16": "TFLOP/s", "fp8": "TFLOP/s"}

_TIMERS = {
    "device": "device time, each call after a write over the L2 cache; the clock's where a call takes over 20 ms",
    "wall": "wall time, launches included",
}


def print_bench(console: Console, run: Run) -> None:
    """The device, its ceilings, a table an op, what was timed beside it, and what is missing or wrong."""
    console.print(Text(f"Runs on   {run.device}, jax {run.jax}"), soft_wrap=True)
    console.print(Text(f"us        median {_TIMERS[run.timer]}"), soft_wrap=True)
    ceilings = ", ".join(f"{name} {short(value / 1e12)} {_UNITS[name]}" for name, value in run.ceilings.items())
    console.print(Text(f"Ceilings  {ceilings}, through XLA, in this run"), soft_wrap=True)
    for op, results in itertools.groupby(run.results, lambda result: result.case.op):
        same = list(results)
        console.print()
        layers = [result for result in same if isinstance(result, LayerResult)]
        products = [result for result in same if isinstance(result, Result)]
        for made in layer_tables(layers) if layers else (_figures(op, products), _beside(op, products)):
            console.print(made)
    for note in run.notes:
        console.print(Text(note, "yellow"), soft_wrap=True)
    for result in run.results:
        if isinstance(result, Result) and not result.ok:
            console.print(Text(_wrong(result), "bold red"), soft_wrap=True)


def _figures(op: str, results: list[Result]) -> Table:
    made = table(_title(op, results), "rows")
    for heading in ("us", "min-max", "TFLOP/s", "TB/s", "% roof", "x xla", "error"):
        made.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        timing = result.timing
        made.add_row(
            _label(result.case),
            us(timing.us),
            f"{us(timing.us_min)}-{us(timing.us_max)}",
            short(result.tflops),
            short(result.tbs),
            short(100 * result.roof_us / timing.us),
            "-" if result.xla_us is None else short(result.xla_us / timing.us),
            "-" if result.error is None else f"{result.error:.1e}".replace("e-0", "e-"),
        )
    return made


def _beside(op: str, results: list[Result]) -> Table:
    """Compilation, variants and peers, a peer's with ours over it; of the latter only columns that hold something."""
    made = table(f"{op}, beside it: us, and ours / theirs", "rows")
    headings = ("compile s", "jnp.dot", "from bf16", "fp8 out", "Humming", "e4m3 in", "tokamax")
    columns: dict[str, list[str]] = {heading: [] for heading in headings}
    for result in results:
        ours = result.timing.us
        whole = result.from_bf16_us or ours  # Humming's from bfloat16 rows includes their quantisation
        cells = (
            short(result.compile_s),
            _beside_cell(result.dot_us, ours),
            _beside_cell(result.from_bf16_us),
            _beside_cell(result.quantized_out_us),
            _beside_cell(result.peers.get("humming_us"), whole),
            _beside_cell(result.peers.get("humming_prequantised_us"), ours),
            _beside_cell(result.peers.get("tokamax_us"), ours),
        )
        for column, cell in zip(columns.values(), cells, strict=True):
            column.append(cell)
    shown = {heading: column for heading, column in columns.items() if set(column) != {"-"}}
    for heading in shown:
        made.add_column(heading, justify="right", no_wrap=True)
    for index, result in enumerate(results):
        made.add_row(_label(result.case), *(column[index] for column in shown.values()))
    return made


def _beside_cell(theirs: float | None, ours: float | None = None) -> str:
    if theirs is None:
        return "-"
    return us(theirs) if ours is None else f"{us(theirs)} {ours / theirs:.2f}"


def _title(op: str, results: list[Result]) -> str:
    case = results[0].case
    names = ", ".join(dict.fromkeys(result.implementation for result in results))
    if not case.flop:
        return f"{op}, {names}: [rows, {case.depth}]"
    situ = " + SiTU" if case.gated else ""
    experts = f"{case.groups} experts, " if case.groups else ""
    return f"{op}{situ}, {names}: {experts}[rows, {case.depth}] x [{case.columns}, {case.depth}]"


def _label(case: Case | DenseCase) -> str:
    return " ".join(filter(None, (f"{case.rows:>6}", case.distribution, case.recipe)))


def _wrong(result: Result) -> str:
    limit = ERROR_LIMITS[result.case.recipe]
    case = " ".join(_label(result.case).split())
    return f"{result.case.op} {case}: the result is wrong, relative L2 {result.error:.1e} where {limit:g} is allowed"
