"""The HTML report of `k3jax compare`: one file that needs nothing else, with inline SVG plots and no script."""

import math
from collections.abc import Iterable

from k3jax.compare import svg
from k3jax.compare.differences import HISTOGRAM_FIRST
from k3jax.compare.layer import LayerComparison, StageResult
from k3jax.compare.ranks import RANK_HEADINGS, rank_cells
from k3jax.compare.report_style import STYLE
from k3jax.compare.run import Run
from k3jax.compare.svg import escape

_SMALLEST = 1e-10


def html_report(run: Run, *, command: str) -> str:
    """The whole page. Every string that comes from files or the command line is escaped."""
    layers = dict.fromkeys(result.layer for result in run.results)
    sections = "".join(_layer([result for result in run.results if result.layer == layer]) for layer in layers)
    status = "pass" if run.ok else "fail"
    headline = "All stages agree" if run.ok else "A stage diverges"
    facts = [("Checkpoint", run.checkpoint), ("Input", run.input), ("Truth", run.truth)]
    facts += [("Mesh", run.mesh)] if run.mesh else []
    verdict = "".join(f"<p>{escape(line)}</p>" for line in run.verdict.splitlines())
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>k3jax compare: {escape(headline.lower())}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<header class="{status}">
<p class="eyebrow">k3jax compare</p>
<h1><span class="badge" aria-hidden="true">{"✓" if run.ok else "✗"}</span>{escape(headline)}</h1>
<div class="verdict">{verdict}</div>
<dl class="facts">{_facts(facts)}</dl>
{_overview(run)}
</header>
{sections}
{_environment(run, command)}
</main>
</body>
</html>
"""


def _facts(facts: Iterable[tuple[str, object]]) -> str:
    return "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)


def _overview(run: Run) -> str:
    """One row a layer and recipe: verdict, first divergence, the output's error."""
    rows = []
    dense: set[int] = set()
    for result in run.results:
        if result.layer in dense:  # Its one result stands for all recipes.
            continue
        dense |= {result.layer} if result.kind == "dense" else set()
        recipe = "every recipe" if result.kind == "dense" else result.recipe
        first, output = result.first_divergence, result.stage("output")
        error = "" if output is None or output.difference is None else _sci(output.difference.relative_l2)
        said = "all stages agree" if first is None else f"first divergence: {first.stage}"
        rows.append(
            f'<tr class="{_status(result.ok)}"><td><a href="#layer-{result.layer}">{result.layer}</a></td>'
            f"<td>{result.kind}</td><td>{escape(recipe)}</td><td>{_verdict(result.ok, said)}</td>"
            f'<td class="n">{error}</td></tr>'
        )
    return _table(("Layer", "Kind", "Recipe", "Verdict", "Output, relative L2"), rows)


def _layer(results: list[LayerComparison]) -> str:
    first = results[0]
    shown = results[:1] if first.kind == "dense" else results
    names = ["every recipe"] if first.kind == "dense" else [result.recipe for result in shown]
    kind = "dense" if first.kind == "dense" else f"mixture of {len(first.expert_load)} experts"
    keys = "".join(f"<span>{svg.legend_marker(index)}{escape(name)}</span>" for index, name in enumerate(names))
    plots = [
        _plot(
            "Error by stage",
            "Relative L2 on a log scale. The vertical tick in each lane is the limit: dots belong to its left.",
            _stages_plot(shown, names),
        ),
        _plot(
            "Distribution of the output's errors",
            "Elements by error, in powers of two of the output's root mean square. Exact ones are not counted.",
            _histogram_plot(shown),
        ),
        _plot("Error by token", "Relative L2 of each token's output, to one scale.", *_token_plots(shown, names)),
    ]
    if first.kind == "moe":
        experts = "Relative L2 of the experts' sum, over the tokens that picked each expert, to one scale."
        plots += [
            _plot("Error by expert", experts, *_expert_plots(shown, names)),
            _plot("Expert load", "Rows that each expert computed. Dashed: the mean.", _load_plot(first)),
        ]
    tables = "".join(_numbers(result, name) for result, name in zip(shown, names, strict=True))
    return (
        f'<section id="layer-{first.layer}"><h2>Layer {first.layer} <small>{kind}, {first.tokens:,} tokens</small></h2>'
        f'<p class="legend">{keys}</p><div class="plots">{"".join(plots)}</div>{_rank_table(first)}{tables}</section>'
    )


def _rank_table(result: LayerComparison) -> str:
    rows = [f"<tr>{''.join(f'<td class="n">{cell}</td>' for cell in rank_cells(rank))}</tr>" for rank in result.ranks]
    return f"<details open><summary>By rank</summary>{_table(RANK_HEADINGS, rows)}</details>" if rows else ""


def _plot(title: str, caption: str, *plots: str) -> str:
    drawn = "".join(filter(None, plots))
    return (
        f"<figure><h3>{escape(title)}</h3><figcaption>{escape(caption)}</figcaption>{drawn}</figure>" if drawn else ""
    )


def _stages_plot(results: list[LayerComparison], names: list[str]) -> str:
    rows = []
    for stage in dict.fromkeys(stage.stage for result in results for stage in result.stages):
        points, limits = [], []
        for index, (result, name) in enumerate(zip(results, names, strict=True)):
            found = result.stage(stage)
            if found is None or not found.checks or found.difference is None:
                continue
            check = found.checks[0]
            points.append(svg.Point(index, check.value, found.ok, f"{stage}, {name}: {check}"))
            limits.append((index, check.limit))
        rows.append(svg.Row(stage, tuple(points), tuple(limits)))
    return svg.log_dots(rows, smallest=_SMALLEST, largest=1.0, label="Relative L2 error by stage")


def _histogram_plot(results: list[LayerComparison]) -> str:
    outputs = [result.stage("output") for result in results]
    counts = [() if output is None else output.histogram for output in outputs]
    if not any(counts):  # A partial capture may lack the output.
        return ""
    return svg.steps(counts, first_power=HISTOGRAM_FIRST, label="Histogram of errors of the output")


def _token_plots(results: list[LayerComparison], names: list[str]) -> list[str]:
    """A plot a recipe, all to one scale; the dashed line is what one token may be off."""
    found = [result.stage("output") for result in results]
    errors = [() if output is None else output.token_errors for output in found]
    frame = svg.BarFrame("Error by token", "token", _largest(errors), _worst_allowed(found))
    plots = []
    for series, (values, name) in enumerate(zip(errors, names, strict=True)):
        titles = [f"{name}, token {token}: {error:.2e}" for token, error in enumerate(values)]
        plots += [svg.bars(values, titles, frame, series=series, name=name)] if values else []
    return plots


def _expert_plots(results: list[LayerComparison], names: list[str]) -> list[str]:
    found = [result.stage("experts") for result in results]
    errors = [() if experts is None else experts.expert_errors for experts in found]
    frame = svg.BarFrame("Error by expert", "expert", _largest(errors))
    plots = []
    for series, (values, name, result) in enumerate(zip(errors, names, results, strict=True)):
        titles = [
            f"{name}, expert {expert}: {error:.2e} over {result.expert_load[expert]} rows"
            for expert, error in enumerate(values)
        ]
        plots += [svg.bars(values, titles, frame, series=series, name=name)] if values else []
    return plots


def _load_plot(result: LayerComparison) -> str:
    load = [float(rows) for rows in result.expert_load]
    titles = [f"expert {expert}: {rows:.0f} rows" for expert, rows in enumerate(load)]
    frame = svg.BarFrame("Expert load", "expert", max(load, default=0.0), sum(load) / max(len(load), 1))
    return svg.bars(load, titles, frame, series=4, name="rows")


def _largest(errors: Iterable[Iterable[float]]) -> float:
    return max((error for values in errors for error in values if math.isfinite(error)), default=0.0)


def _worst_allowed(stages: Iterable[StageResult | None]) -> float | None:
    checks = [check for stage in stages if stage is not None for check in stage.checks if check.name == "worst token"]
    return checks[0].limit if checks else None


def _numbers(result: LayerComparison, name: str) -> str:
    rows = "".join(_stage_row(stage) for stage in result.stages)
    headings = ("Stage", "Verdict", "Relative L2", "Limit", "Cosine", "Max error", "Non-zero", "Truth", "Worst tokens")
    skipped = ""
    if result.skipped_tokens:
        skipped = (
            f"<p>{result.skipped_tokens} tokens went to other experts than in the capture; "
            "the stages after the router leave them out.</p>"
        )
    open_attribute = "" if result.ok else " open"
    summary = f"{escape(name)} {_verdict(result.ok, 'agrees' if result.ok else 'diverges')}"
    table = _table(headings, [rows])
    return f"<details{open_attribute}><summary>All numbers: {summary}</summary>{skipped}{table}</details>"


def _stage_row(stage: StageResult) -> str:
    found = stage.difference
    cells = [""] * 6
    if found is not None and stage.checks:
        cells = [_sci(found.relative_l2), f"{stage.checks[0].limit:g}", f"{found.cosine:.6f}", _sci(found.max_error)]
        cells += [f"{found.nonzero:.2%}", f"{found.nonzero_truth:.2%}"]
    worst = ", ".join(f"{token} ({error:.1e})" for token, error in stage.worst_tokens[:2])
    row = (
        f'<tr class="{_status(stage.ok)}"><td>{escape(stage.stage)}</td><td>{_verdict(stage.ok)}</td>'
        + "".join(f'<td class="n">{cell}</td>' for cell in cells)
        + f"<td>{worst}</td></tr>"
    )
    failed = [("note wrong", f"failed: {'; '.join(stage.reasons)}")] if stage.reasons else []
    notes = failed + [("note", note) for note in _notes(stage)]
    return row + "".join(
        f'<tr class="{kind}"><td></td><td colspan="8">{escape(note)}</td></tr>' for kind, note in notes
    )


def _notes(stage: StageResult) -> Iterable[str]:
    if stage.picks is not None:
        others = [f"{check.name} {check.value:.2e}" for check in stage.checks[1:] if check.name == "weights"]
        picks = f"picks agree in {stage.picks.agreement:.4%} of pairs, {stage.picks.near_ties} near ties"
        yield ", ".join([picks, *others])
    if stage.worst_experts and not stage.ok:
        yield "worst experts: " + ", ".join(f"{expert} ({error:.1e})" for expert, error in stage.worst_experts)


def _environment(run: Run, command: str) -> str:
    facts = [("command", command), *run.environment.items(), ("seconds", f"{run.seconds:.1f}")]
    rows = [
        f"<tr><th scope='row'>{escape(name)}</th><td><code>{escape(value)}</code></td></tr>" for name, value in facts
    ]
    return f"<section><h2>Environment</h2><div class='scroll'><table>{''.join(rows)}</table></div></section>"


def _table(headings: Iterable[str], rows: Iterable[str]) -> str:
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _status(ok: bool) -> str:
    return "pass" if ok else "fail"


def _verdict(ok: bool, text: str = "") -> str:
    said = text or ("agrees" if ok else "diverges")
    return f'<span class="pill {_status(ok)}">{"✓" if ok else "✗"} {escape(said)}</span>'


def _sci(value: float) -> str:
    return "0" if value == 0 else f"{value:.2e}"
