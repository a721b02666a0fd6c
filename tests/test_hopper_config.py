"""The Hopper kernel's tunings: what the heuristic picks can run, and what cannot run is refused with the reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul.config import SHARED_MEMORY, Tuning, choose_tuning, shared_memory
from pallas_kernels.grouped_matmul.kernel_layout import Mma

MMA = st.sampled_from(("bf16", "e4m3"))


@given(
    rows=st.integers(1, 200_000),
    groups=st.sampled_from((1, 7, 8, 56, 112, 896)),
    n=st.integers(1, 100).map(lambda units: 128 * units),
    k=st.integers(1, 60).map(lambda units: 256 * units),
    mma=MMA,
    gated=st.booleans(),
)
def test_the_heuristic_s_choice_can_run(rows: int, groups: int, n: int, k: int, mma: Mma, gated: bool) -> None:
    tuning = choose_tuning(rows, groups, n, k, mma, gated)
    assert tuning.reason_against(n, k, mma, gated, groups) is None
    assert shared_memory(tuning, mma, gated, groups) <= SHARED_MEMORY


@pytest.mark.parametrize("mma", ["bf16", "e4m3"])
@pytest.mark.parametrize(("n", "k", "gated"), [(6144, 3584, True), (3584, 3072, False)], ids=["w13", "w2"])
def test_a_mean_group_of_the_model_wastes_less_than_one_granule(n: int, k: int, gated: bool, mma: Mma) -> None:
    large = 147 if mma == "bf16" else 118  # of 586 rows in four tiles, or in five
    for rows, mean in ((128, 2), (2048, 19), (8192, 74), (16384, 147), (65536, large)):
        assert 0 <= choose_tuning(rows, 112, n, k, mma, gated).widest - mean < 8


def test_shapes_that_no_tuning_fits_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="N=96 and K=256"):
        choose_tuning(8, 1, 96, 256, "bf16", False)


@pytest.mark.parametrize(
    ("tuning", "reason"),
    [
        (Tuning((8,), 4, 1, 2, 4), "N=128 is not a multiple of 256"),
        (Tuning((8,), 1, 1, 8, 2), "K=256 is not a multiple of 512"),
        (Tuning((8,), 1, 1, 1, 4), "too short for the pipeline"),
        (Tuning((152,), 1, 2, 4, 8), "bytes of shared memory exceed"),
    ],
)
def test_a_tuning_that_cannot_run_says_why(tuning: Tuning, reason: str) -> None:
    assert reason in str(tuning.reason_against(128, 256, "bf16", False, 8))


@pytest.mark.parametrize(
    ("tuning", "mma", "reason"),
    [
        (Tuning((160,), 2, 2, 2, 2), "bf16", "more than its warpgroups have registers for"),
        (Tuning((152,), 2, 2, 2, 2), "e4m3", "more than its warpgroups have registers for"),
        (Tuning((8,), 2, 2, 8, 2), "e4m3", "a stage of 512 columns is longer than e4m3 products are summed up"),
        (Tuning((8,), 2, 2, 1, 2), "e4m3", "a stage of 64 columns is no multiple of 128 bytes"),
    ],
)
def test_sums_that_do_not_fit_or_grow_too_long_are_refused(tuning: Tuning, mma: Mma, reason: str) -> None:
    assert reason in str(tuning.reason_against(256, 512, mma, False, 8))


@pytest.mark.parametrize(
    ("widths", "warpgroups", "units", "stages"),
    [((), 2, 1, 4), ((12,), 2, 1, 4), ((16, 8), 2, 1, 4), ((8,), 5, 1, 4), ((264,), 2, 1, 4), ((8,), 2, 1, 1)],
)
def test_values_that_no_shape_could_use_are_refused(
    widths: tuple[int, ...], warpgroups: int, units: int, stages: int
) -> None:
    with pytest.raises(ValueError, match=r"widths|warpgroups"):
        Tuning(widths, warpgroups, units, 2, stages)
