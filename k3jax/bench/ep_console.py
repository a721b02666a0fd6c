"""What `k3jax bench --op ep` prints: what ranks exchange beside bare collectives, the layer beside one device."""

import itertools

from rich.console import Console
from rich.table import Table
from rich.text import Text

from k3jax.bench.ep_run import ERROR_LIMIT, PARTS, EpResult, EpRun
from k3jax.bench.tables import short, table, us


def print_ep(console: Console, run: EpRun) -> None:
    """The devices, the link, two tables a recipe, and what is wrong."""
    console.print(Text(f"Runs on   {run.device}, jax {run.jax}"), soft_wrap=True)
    console.print(Text(f"us        median {run.timer} time of the first rank"), soft_wrap=True)
    console.print(Text(f"Link      {run.link / 1e9:.3g} GB/s to a neighbour, in this run"), soft_wrap=True)
    for recipe, same in itertools.groupby(run.results, lambda result: result.case.layer.recipe):
        results = list(same)
        console.print()
        console.print(_exchange(recipe, results, run.link))
        console.print(_layer(recipe, results))
    for result in run.results:
        if not result.ok:
            label = " ".join(_label(result).split())
            text = f"{label}: not one device's output, relative L2 {result.error:.1e} where {ERROR_LIMIT:g} is allowed"
            console.print(Text(text, "bold red"), soft_wrap=True)


def _exchange(recipe: str, results: list[EpResult], link: float) -> Table:
    case = results[0].case
    made = table(f"{recipe}, {case.ranks} ranks of {case.layer.groups // case.ranks} experts", "tokens a rank")
    for heading in (*(f"{part} us" for part in PARTS), "MB sent", "GB/s", "% a2a", "% link"):
        made.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        made.add_row(
            _label(result),
            *(us(result.parts[part].us) for part in PARTS),
            short((result.sent.dispatch + result.sent.combine) / 1e6),
            short(result.exchange_rate / 1e9),
            short(100 * result.all_to_all_share),
            short(100 * result.exchange_rate / link),
        )
    return made


def _layer(recipe: str, results: list[EpResult]) -> Table:
    case = results[0].case
    made = table(f"{recipe}, the layer: {case.ranks} ranks, and one device with all experts", "tokens a rank")
    for heading in ("us", "min-max", "one device us", "x tokens/s", "error"):
        made.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        made.add_row(
            _label(result),
            us(result.whole.us),
            f"{us(result.whole.us_min)}-{us(result.whole.us_max)}",
            us(result.one_device.us),
            f"{result.speedup:.2f}",
            f"{result.error:.1e}".replace("e-0", "e-"),
        )
    return made


def _label(result: EpResult) -> str:
    return f"{result.case.tokens:>5} {result.transport}"
