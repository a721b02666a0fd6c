"""The Blackwell kernel's tunings: what the heuristic picks can run, and what cannot run is refused with the reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul.blackwell.config import BlackwellTuning, choose_tuning, shared_memory
from pallas_kernels.grouped_matmul.config import SHARED_MEMORY


@given(
    rows=st.integers(1, 200_000),
    groups=st.sampled_from((1, 7, 8, 56, 112, 896)),
    n=st.integers(1, 100).map(lambda slabs: 128 * slabs),
    k=st.integers(1, 120).map(lambda units: 64 * units),
    gated=st.booleans(),
)
def test_the_heuristic_s_choice_can_run(rows: int, groups: int, n: int, k: int, gated: bool) -> None:
    tuning = choose_tuning(rows, groups, n, k, gated)
    assert tuning.reason_against(n, k, gated, groups) is None
    assert shared_memory(tuning, gated, groups) <= SHARED_MEMORY
    # Tensor memory has 512 columns; a turn's places in a ring must be its own.
    sums = tuning.accumulators * tuning.slabs * tuning.sums_columns
    assert sums + tuning.operands * tuning.slabs * tuning.k_units * 32 <= 512
    assert tuning.operands % tuning.turns == tuning.stages % tuning.turns == 0


def test_a_mean_group_of_the_model_wastes_less_than_one_granule() -> None:
    for rows, mean in ((128, 2), (2048, 19), (8192, 74), (16384, 147), (65536, 147)):  # the last: 586 in four tiles
        assert 0 <= choose_tuning(rows, 112, 6144, 3584, True).widest - mean < 16


def test_sums_are_stored_beside_the_next_products_where_both_fit() -> None:
    assert BlackwellTuning(96, 2, 2, 1, 4).accumulators == 2  # 384 columns of sums, 128 for two operands
    assert BlackwellTuning(112, 2, 2, 1, 4).accumulators == 1


def test_shapes_that_no_tuning_fits_are_refused() -> None:
    for n, k in ((64, 64), (128, 96)):
        with pytest.raises(NotImplementedError, match=f"N={n} and K={k}"):
            choose_tuning(8, 1, n, k, False)


@pytest.mark.parametrize(
    ("tuning", "reason"),
    [
        (BlackwellTuning(16, 2, 2, 1, 2), "N=128 is not a multiple of 256"),
        (BlackwellTuning(16, 1, 1, 3, 2), "K=256 is not a multiple of 192"),
        (BlackwellTuning(256, 1, 2, 4, 2), "bytes of shared memory exceed"),
        (BlackwellTuning(256, 1, 4, 4, 4), "no room for two decoded stages"),
    ],
)
def test_a_tuning_that_cannot_run_says_why(tuning: BlackwellTuning, reason: str) -> None:
    assert reason in str(tuning.reason_against(128, 256, False, 8))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((24, 1, 1, 1, 2), "widest=24 is not a multiple of 16"),
        ((272, 1, 1, 1, 2), "widest=272"),
        ((16, 2, 3, 1, 2), r"\(2, 3\) is not one of"),
        ((16, 1, 4, 1, 6), "a multiple of 4"),
    ],
)
def test_values_that_no_shape_could_use_raise(arguments: tuple[int, int, int, int, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        BlackwellTuning(*arguments)
