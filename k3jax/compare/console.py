"""What `k3jax compare` prints: a table a layer, what failed and where, and the verdict."""

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from k3jax.compare.differences import Difference
from k3jax.compare.layer import Check, LayerComparison, StageResult
from k3jax.compare.ranks import RANK_HEADINGS, rank_cells
from k3jax.compare.run import Run

_SECONDARY_CHECKS = {"router": ("pick agreement", "weights"), "output": ("cosine",)}
"""Checks that have a row of their own, besides each stage's first one."""


def print_run(console: Console, run: Run, *, details: bool) -> None:
    """The whole result: where it comes from, a table a layer, the details of what failed, and the verdict."""
    environment = run.environment
    console.print(Text(f"Checkpoint  {run.checkpoint}"), soft_wrap=True)
    console.print(Text(f"Input       {run.input}"), soft_wrap=True)
    console.print(Text(f"Truth       {run.truth}"), soft_wrap=True)
    console.print(Text(f"Runs on     {environment['device']}, jax {environment['jax']}{_implementations(run)}"))
    if run.mesh:
        console.print(Text(f"Mesh        {run.mesh}"))
    console.print(
        Text("Numbers are relative L2 errors, |ours - truth| / |truth|, unless the row says otherwise.", "dim")
    )
    for layer in dict.fromkeys(result.layer for result in run.results):
        results = [result for result in run.results if result.layer == layer]
        console.print()
        console.print(_layer_table(results, console))
        if results[0].ranks:
            console.print(_rank_table(results[0]))
        for result in _distinct(results):
            if details:
                console.print(_details(result, console))
            for line in _worst(result):
                console.print(Text(line, "red"), soft_wrap=True)
    console.print()
    for line in run.verdict.splitlines():
        console.print(Text(f"{_mark(run.ok, console)} {line}", "bold green" if run.ok else "bold red"), soft_wrap=True)
    console.print(Text(f"{run.seconds:.1f} s", "dim"))


def _implementations(run: Run) -> str:
    """`, xla grouped_matmul`, or which recipe ran on which implementation where they differ."""
    by_recipe = {result.recipe: result.implementation for result in run.results if result.implementation}
    names = set(by_recipe.values())
    if len(names) < 2:
        return "".join(f", {name} grouped_matmul" for name in names)
    return ", grouped_matmul: " + ", ".join(f"{recipe} {name}" for recipe, name in by_recipe.items())


def _distinct(results: list[LayerComparison]) -> list[LayerComparison]:
    """A dense layer's one result stands for all recipes."""
    return results[:1] if results[0].kind == "dense" else results


def _layer_table(results: list[LayerComparison], console: Console) -> Table:
    shown = _distinct(results)
    first = shown[0]
    kind = "dense" if first.kind == "dense" else f"mixture of {len(first.expert_load)} experts"
    title = Text(f"Layer {first.layer}, {kind}", "bold")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("stage", no_wrap=True)
    for result in shown:
        heading = "every recipe" if first.kind == "dense" else result.recipe
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("limit", style="dim", no_wrap=True)
    for stage, name in _rows(shown):
        checks = [_check(result, stage, name) for result in shown]
        cells = [_cell(result.stage(stage), check, console) for result, check in zip(shown, checks, strict=True)]
        label = stage if name in ("relative L2", "") else f"{stage} {'picks' if name == 'pick agreement' else name}"
        table.add_row(label, *cells, _limit(checks))
    return table


def _limit(checks: list[Check | None]) -> str:
    known = [check for check in checks if check is not None]
    limits = dict.fromkeys(
        f"{check.limit:.2%}" if _is_share(check) else f"{check.limit:g}".replace("e-0", "e-") for check in known
    )
    return f"{'≥' if known[0].at_least else '≤'} {' / '.join(limits)}" if known else ""


def _is_share(check: Check) -> bool:
    return check.name == "pick agreement"


def _rows(results: list[LayerComparison]) -> list[tuple[str, str]]:
    """(stage, check) of each row, in order; a stage that lacks its checks has a row too."""
    rows: dict[tuple[str, str], None] = {}
    for result in results:
        for stage in result.stages:
            names = [check.name for check in stage.checks]
            wanted = names[:1] + [name for name in _SECONDARY_CHECKS.get(stage.stage, ()) if name in names]
            rows |= dict.fromkeys((stage.stage, name) for name in wanted or [""])
    return list(rows)


def _check(result: LayerComparison, stage: str, name: str) -> Check | None:
    found = result.stage(stage)
    return None if found is None else next((check for check in found.checks if check.name == name), None)


def _cell(stage: StageResult | None, check: Check | None, console: Console) -> Text:
    """A number with its mark. The stage's first number carries the whole stage's verdict, a later one its own."""
    if stage is None:
        return Text("-", "dim")
    if check is None:
        return Text(f"missing {_mark(False, console)}", "red")
    ok = stage.ok if check is stage.checks[0] else check.ok
    return Text(f"{_number(check)} {_mark(ok, console)}", "green" if ok else "bold red")


def _number(check: Check) -> str:
    if _is_share(check):
        return f"{check.value:.2%}" if check.value < 1 else "100%"
    return f"{check.value:.5f}" if check.name == "cosine" else _short(check.value)


def _short(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")


def _mark(ok: bool, console: Console) -> str:
    if console.encoding.lower().startswith("utf"):
        return "✓" if ok else "✗"
    return "ok" if ok else "FAIL"


def _rank_table(result: LayerComparison) -> Table:
    """What each rank did. Routing is float32 under every recipe, so one recipe's table stands for all."""
    table = Table(title=Text("By rank", "bold"), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in RANK_HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for rank in result.ranks:
        table.add_row(*rank_cells(rank))
    return table


def _details(result: LayerComparison, console: Console) -> Table:
    """Every number of one layer and recipe."""
    title = Text(f"Layer {result.layer}, {result.recipe}: all numbers", "bold")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("stage", no_wrap=True)
    for heading in ("rel. L2", "cosine", "max error", "non-zero %", "worst token"):  # non-zero: ours / the truth's
        table.add_column(heading, justify="right", no_wrap=True)
    for stage in result.stages:
        name = Text(f"{stage.stage} {_mark(stage.ok, console)}", "" if stage.ok else "bold red")
        worst = "".join(f"{token}: {_short(error)}" for token, error in stage.worst_tokens[:1])
        table.add_row(name, *_difference_cells(stage.difference), worst)
    return table


def _difference_cells(found: Difference | None) -> tuple[str, ...]:
    if found is None:
        return ("", "", "", "")
    shares = f"{100 * found.nonzero:.1f}/{100 * found.nonzero_truth:.1f}"
    return (_short(found.relative_l2), f"{found.cosine:.6f}", _short(found.max_error), shares)


def _worst(result: LayerComparison) -> Iterator[str]:
    """Where the first stage that diverges is worst; nothing where all agree."""
    stage = result.first_divergence
    if stage is None:
        return
    yield f"{result.recipe}, {stage.stage}: {'; '.join(stage.reasons)}"
    for what, worst in (("tokens", stage.worst_tokens), ("experts", stage.worst_experts)):
        if worst:
            yield f"    worst {what} (relative L2)  " + "  ".join(f"{index} ({error:.2g})" for index, error in worst)
    if stage.picks is not None and stage.picks.disagreeing:
        tokens = ", ".join(map(str, stage.picks.tokens[:10]))
        near_ties = f"{stage.picks.near_ties} more are near ties"
        yield f"    {stage.picks.disagreeing} picks differ, of tokens {tokens}; {near_ties}"
