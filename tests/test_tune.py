"""The search over the Hopper kernel's tunings: what it would time can run, and the heuristic's choice is among it."""

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from k3jax.bench.cases import Case
from pallas_kernels.grouped_matmul.config import Tuning, choose_tuning
from pallas_kernels.grouped_matmul.kernel_layout import RECIPES

SCRIPT = Path(__file__).parent.parent / "scripts" / "tune.py"


@pytest.fixture(scope="module")
def candidates() -> Callable[[Case], list[Tuning]]:
    found: Callable[[Case], list[Tuning]] = runpy.run_path(str(SCRIPT))["candidates"]
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
