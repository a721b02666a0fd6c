"""The HTML report: one file that needs nothing else, holds the numbers, and trusts no string."""

import dataclasses
import math
from html.parser import HTMLParser
from pathlib import Path

import pytest

from k3jax.compare import svg
from k3jax.compare.differences import Difference
from k3jax.compare.layer import Check, LayerComparison, StageResult
from k3jax.compare.picks import Picks
from k3jax.compare.report import html_report
from k3jax.compare.run import Run

VOID = {"meta", "link", "br", "hr", "img", "input"}
HOSTILE = "<script>alert('x')</script>\"&<svg onload=alert(1)>"


class Page(HTMLParser):
    """Parses strictly: every tag that opens closes, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def stage(name: str, error: float, limit: float = 4e-3) -> StageResult:
    tokens = (error, error / 2, 0.0)
    return StageResult(
        name,
        checks=(Check("relative L2", error, limit), Check("worst token", error, 10 * limit)),
        difference=Difference(error, 1 - error, error, 0.99, 1.0, 0, 12),
        token_errors=tokens,
        expert_errors=(error, math.nan, math.inf) if name == "experts" else (),
        worst_tokens=((17, error),),
        worst_experts=((2, math.inf),) if name == "experts" else (),
        histogram=tuple(range(28)),
    )


def moe(recipe: str, error: float) -> LayerComparison:
    picks = Picks(0.75, 1, 2, (4, 5))
    router = dataclasses.replace(stage("router", 1e-7, 1e-5), picks=picks)
    stages = (router, stage("latent", 0.0), stage("experts", error), StageResult("norm", missing="no such stage"))
    return LayerComparison(1, "moe", recipe, "oracle", 3, (*stages, stage("output", error)), "xla", (4, 0, 2), 1)


def a_run(error: float = 3.21e-2) -> Run:
    dense = LayerComparison(0, "dense", "bf16", "oracle", 3, (stage("output", 1.5e-3), stage("activation", 0.0)))
    results = (dense, moe("bf16", 4.5e-4), moe("w4a8", error))
    return Run(Path("folder"), "3 tokens", "oracle", "the oracle", {"jax": "9.8.7"}, results, 12.3)


def test_the_report_needs_nothing_else() -> None:
    text = html_report(a_run(), command="k3jax compare")
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(page.tags)
    names = {name for name, _ in page.attributes}
    assert not {"src", "srcset", "xlink:href", "onload", "onclick"} & names
    links = [value for name, value in page.attributes if name == "href"]
    assert links
    assert all(value is not None and value.startswith("#layer-") for value in links)
    for reference in ("http:", "https:", "//", "@import", "url("):
        assert reference not in text


def test_the_report_has_the_verdict_the_numbers_and_the_plots() -> None:
    text = html_report(a_run(), command="k3jax compare --tokens 3")
    page = Page(text)
    words = " ".join(page.words)
    assert "A stage diverges" in words
    assert "Layer 1, w4a8: first divergence at stage experts (relative L2 0.0321, above 0.004)" in words
    for expected in (
        "3.21e-02",
        "4.50e-04",
        "1.50e-03",
        "9.8.7",
        "k3jax compare --tokens 3",
        "17 (3.2e-02)",
        "75.0000%",
    ):
        assert expected in words, expected
    for title in ("Error by stage", "Error by token", "Error by expert", "Expert load", "output's errors"):
        assert title in words
    assert "1 tokens went to other experts" in words
    # The numbers of what diverges lie open, those of what agrees do not.
    assert (text.count("<details><summary>All numbers"), text.count("<details open><summary>All numbers")) == (1, 2)
    labels = [value for name, value in page.attributes if name == "aria-label"]
    assert {"Relative L2 error by stage", "Error by expert, w4a8", "Expert load, rows"} <= set(labels)
    assert "All stages agree" in html_report(dataclasses.replace(a_run(), results=a_run().results[:1]), command="")


def test_hostile_strings_stay_text() -> None:
    spoiled = moe(HOSTILE, 1.0)
    bad = dataclasses.replace(spoiled.stages[2], stage=HOSTILE, missing=HOSTILE)
    results = (dataclasses.replace(spoiled, stages=(bad, *spoiled.stages)),)
    environment = {HOSTILE: HOSTILE}
    run = dataclasses.replace(
        a_run(), checkpoint=Path(HOSTILE), input=HOSTILE, truth=HOSTILE, environment=environment, results=results
    )
    text = html_report(run, command=HOSTILE)
    page = Page(text)
    assert "script" not in page.tags
    assert "onload" not in {name for name, _ in page.attributes}
    assert HOSTILE in " ".join(page.words)


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, 1e-300, 1e300])
def test_plots_take_any_number(value: float) -> None:
    row = svg.Row("stage", (svg.Point(0, value, True, "dot"),), ((0, 1e-3),))
    drawn = svg.log_dots([row], smallest=1e-10, largest=1.0, label="dots")
    drawn += svg.bars([value, 1.0], ["a", "b"], svg.BarFrame("bars", "x", 1.0, 0.5), series=0, name="n")
    drawn += svg.steps([(0,) * 28], first_power=-24, label="steps")
    assert "nan" not in drawn
    assert "inf" not in drawn
    Page(drawn)


def test_a_report_of_nothing_but_missing_stages_is_still_a_page() -> None:
    empty = LayerComparison(
        2, "moe", "bf16", "oracle", 3, (StageResult("experts", missing="no such stage"),), "xla", (0, 0)
    )
    page = Page(html_report(dataclasses.replace(a_run(), results=(empty,)), command=""))
    assert "failed: no such stage" in page.words
