"""The search over the Hopper kernel's tunings, what it found, and what `explain` says of it."""

import dataclasses
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from annotations import unchecked_annotations

from k3jax.bench.calls import KIMI
from k3jax.bench.cases import Case
from pallas_kernels import KernelWeights, TokenScaledArray, explain
from pallas_kernels.grouped_matmul import tuned
from pallas_kernels.grouped_matmul.config import Tuning, choose_tuning
from pallas_kernels.grouped_matmul.kernel_layout import RECIPES

SCRIPT = Path(__file__).parent.parent / "scripts" / "tune.py"


WINNERS = json.loads(tuned.WINNERS.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.fixture(scope="module")
def candidates(script: dict[str, Any]) -> Callable[[Case], list[Tuning]]:
    found: Callable[[Case], list[Tuning]] = script["candidates"]
    return found


@pytest.mark.parametrize("rows", [1, 128, 2048, 16384, 65536])
@pytest.mark.parametrize("recipe", ["w4a16", "w4a8_fp8"])
@pytest.mark.parametrize("op", ["w13", "w2"])
def test_every_candidate_can_run_and_the_heuristic_s_comes_first(
    candidates: Callable[[Case], list[Tuning]], op: str, recipe: str, rows: int
) -> None:
    case = Case(op, recipe, rows)
    found = candidates(case)
    mma, gated = RECIPES[recipe], op == "w13"
    assert found[0] == choose_tuning(rows, 112, case.columns, case.depth, mma, gated)
    assert len(found) == len(set(found)) >= 5
    for tuning in found:
        assert tuning.reason_against(case.columns, case.depth, mma, gated, 112) is None


def test_there_are_winners_for_the_model_s_sizes() -> None:
    found = {(record["op"], record["mma"], record["rows"]) for record in WINNERS}
    assert found >= {(op, mma, rows) for op in ("w13", "w2") for mma in ("bf16", "e4m3") for rows in (128, 2048, 16384)}
    assert len({tuned.key(record) for record in WINNERS}) == len(WINNERS)


@pytest.mark.parametrize("record", WINNERS, ids=lambda record: "{op} {mma} {rows}".format(**record))
def test_a_winner_runs_wherever_its_sizes_recur_and_says_where_it_was_measured(record: dict[str, Any]) -> None:
    shape = record["n"], record["k"], record["mma"], record["gated"]
    for groups in (112, 896):
        chosen = tuned.choose(record["rows"] * groups // 112, groups, *shape)
        assert chosen.source == f"measured on NVIDIA H200, jax 0.11.2, {record['date']}"
        for found, measured in zip(chosen.tuning.launches, tuned.read_tuning(record).launches, strict=True):
            assert found == dataclasses.replace(measured, stages=found.stages)
            assert measured.stages - 1 <= found.stages <= measured.stages
        assert chosen.tuning.reason_against(*shape, groups) is None


def test_what_was_not_measured_is_the_heuristic_s() -> None:
    chosen = tuned.choose(3000, 112, 6144, 3584, "bf16", True)
    assert chosen.tuning == choose_tuning(3000, 112, 6144, 3584, "bf16", True)
    assert "heuristic" in chosen.source


@pytest.mark.parametrize("rows", [128, 16384])
def test_a_winner_that_does_not_fit_gives_way_to_the_heuristic(rows: int) -> None:
    """The tables of so many groups leave no room for two of its stages; those of even more, for no tuning at all."""
    assert "heuristic" in tuned.choose(rows * 20_000 // 112, 20_000, 6144, 3584, "e4m3", True).source
    with pytest.raises(NotImplementedError, match="no tuning fits"):
        tuned.choose(rows * 30_000 // 112, 30_000, 6144, 3584, "e4m3", True)


@pytest.mark.usefixtures("hopper")
def test_explain_says_with_which_tuning_and_where_it_is_from() -> None:
    words: Any = jax.ShapeDtypeStruct((112, 96, 56 * 17, 32), jnp.uint32)
    exponents: Any = jax.ShapeDtypeStruct((112,), jnp.int32)
    for rows, source in ((2048, "measured on NVIDIA H200"), (3000, "by the heuristic")):
        values: Any = jax.ShapeDtypeStruct((rows, 3584), jnp.float8_e4m3fn)
        scales: Any = jax.ShapeDtypeStruct((rows, 1), jnp.float32)
        with unchecked_annotations():
            x, w = TokenScaledArray(values, scales), KernelWeights(words, exponents, "e4m3", True)
            explanation = explain("grouped_matmul", x=x, w=w, activation=KIMI)
        assert explanation.how is not None
        assert explanation.how.startswith("e4m3 products, Tuning(")
        assert source in explanation.how
        assert str(explanation).startswith(f"grouped_matmul: mosaic runs: {explanation.how}\n")


def test_the_winner_is_as_fast_as_any_and_the_least_slowed_down_by_skew(script: dict[str, Any]) -> None:
    times = ({"uniform": 320, "hot": 400}, {"uniform": 310, "hot": 387}, {"uniform": 326, "hot": 377})
    records = [{"us": us} for us in times]
    assert [record["us"]["uniform"] for record in script["ranked"](records)] == [326, 310, 320]
    slower = {"us": {"uniform": 340, "hot": 370}}
    assert script["ranked"]([*records, slower])[-2:] == [slower, records[0]]


def test_a_winner_loses_a_quarter_to_skew_at_most_where_one_does(script: dict[str, Any]) -> None:
    fast, steady = {"us": {"uniform": 300, "hot": 376}}, {"us": {"uniform": 360, "hot": 372}}
    assert script["ranked"]([fast, steady]) == [steady, fast]
    worse = {"us": {"uniform": 300, "hot": 400}}
    assert script["ranked"]([worse, fast]) == [fast, worse]


def test_winners_replace_those_for_the_same_sizes(script: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "winners.json"
    script["write_winners"](file, WINNERS[:3])
    faster = WINNERS[1] | {"us": {"uniform": 1.0}}
    script["write_winners"](file, [faster])
    assert json.loads(file.read_text(encoding="utf-8")) == [WINNERS[0], faster, WINNERS[2]]
