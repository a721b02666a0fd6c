"""The tunings of the Hopper kernel of bfloat16 weights: what the heuristic picks can run, what cannot says why."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul.config import SHARED_MEMORY
from pallas_kernels.grouped_matmul.hopper.dense_config import DenseTuning, choose_tuning
from pallas_kernels.grouped_matmul.schedule import row_tiles


@settings(max_examples=40)
@given(
    rows=st.integers(1, 200_000),
    groups=st.sampled_from((1, 7, 8, 112, 896)),
    n=st.integers(1, 800).map(lambda steps: 16 * steps),
    k=st.integers(1, 120).map(lambda units: 64 * units),
    gated=st.booleans(),
    fine_sums=st.booleans(),
)
def test_the_heuristic_s_choice_can_run(rows: int, groups: int, n: int, k: int, gated: bool, fine_sums: bool) -> None:
    tuning = choose_tuning(rows, groups, n, k, gated, fine_sums=fine_sums)
    assert tuning.reason_against(n, k, gated, groups) is None
    assert tuning.shared_memory(gated, groups) <= SHARED_MEMORY


@pytest.mark.parametrize("gated", [True, False])
def test_few_rows_of_one_group_are_waves_of_equal_shares(gated: bool) -> None:
    for n, k in ((12288, 7168), (7168, 6144), (3584, 7168)):
        for rows in (1, 8, 64):
            tuning = choose_tuning(rows, 1, n, k, gated)
            tiles = row_tiles(rows, tuning.widest) * (n // tuning.tile_rows)
            waves = -(-tiles // 132)  # of an H200's multiprocessors
            assert waves <= 2
            assert tiles >= 112 * waves


# The fastest of what was timed on an H200, by the sizes of a layer's dense products: rows, then widest, warpgroups,
# units, rows of N, units of K in a stage, and stages. Of several within 1.5 % the one that is chosen.
GATE_UP, DOWN, LATENT_DOWN, LATENT_UP = (12288, 7168), (7168, 6144), (3584, 7168), (7168, 3584)
MLP_GATE_UP = (67584, 7168)
GATED = (GATE_UP, MLP_GATE_UP)
FASTEST = {
    (MLP_GATE_UP, 8): (8, 1, 1, 64, 4, 6),
    (MLP_GATE_UP, 64): (64, 1, 2, 128, 1, 9),
    (GATE_UP, 8): (8, 1, 1, 48, 4, 6),
    (GATE_UP, 64): (64, 1, 2, 96, 1, 9),
    (GATE_UP, 256): (128, 3, 1, 192, 1, 5),
    (GATE_UP, 1024): (256, 2, 1, 128, 1, 4),
    (GATE_UP, 8192): (168, 2, 2, 256, 1, 4),
    (DOWN, 8): (8, 1, 1, 56, 4, 6),
    (DOWN, 64): (64, 1, 1, 56, 2, 6),
    (DOWN, 256): (128, 1, 2, 112, 1, 6),
    (DOWN, 1024): (120, 2, 2, 256, 1, 4),
    (DOWN, 8192): (176, 2, 2, 256, 1, 3),
    (LATENT_DOWN, 8): (8, 1, 1, 32, 4, 6),
    (LATENT_DOWN, 64): (32, 1, 1, 56, 2, 9),
    (LATENT_DOWN, 256): (64, 1, 2, 112, 1, 8),
    (LATENT_DOWN, 1024): (120, 2, 2, 256, 1, 4),
    (LATENT_DOWN, 8192): (176, 2, 2, 256, 1, 3),
    (LATENT_UP, 8): (8, 1, 1, 56, 4, 6),
    (LATENT_UP, 64): (64, 1, 1, 56, 2, 6),
    (LATENT_UP, 256): (128, 1, 2, 112, 1, 6),
    (LATENT_UP, 1024): (120, 2, 2, 256, 1, 4),
}
FASTEST_OF_FINE_SUMS = {
    (LATENT_DOWN, 64): (32, 1, 1, 56, 2, 9),
    (LATENT_DOWN, 128): (64, 1, 1, 56, 1, 12),
    (LATENT_DOWN, 1024): (120, 2, 1, 128, 1, 6),
    (LATENT_DOWN, 8192): (176, 2, 1, 128, 1, 5),
}


@pytest.mark.parametrize(("weights", "rows"), FASTEST)
def test_the_choice_is_what_was_timed_to_be_the_fastest(weights: tuple[int, int], rows: int) -> None:
    require_choice(choose_tuning(rows, 1, *weights, gated=weights in GATED), FASTEST[weights, rows])


@pytest.mark.parametrize(("weights", "rows"), FASTEST_OF_FINE_SUMS)
def test_the_choice_of_fine_sums_is_what_was_timed_to_be_the_fastest(weights: tuple[int, int], rows: int) -> None:
    fine = choose_tuning(rows, 1, *weights, gated=False, fine_sums=True)
    require_choice(fine, FASTEST_OF_FINE_SUMS[weights, rows])


def require_choice(chosen: DenseTuning, cut: tuple[int, ...]) -> None:
    width, *rest = cut
    found = [chosen.warpgroups, chosen.units, chosen.tile_rows, chosen.k_units, chosen.stages, chosen.band]
    assert (chosen.widths, found) == ((width,), [*rest, 12])


@pytest.mark.parametrize(("n", "k"), [LATENT_DOWN, LATENT_UP, DOWN])
def test_few_rows_have_short_sums_and_many_where_asked(n: int, k: int) -> None:
    def longest(rows: int, *, fine_sums: bool = False) -> float:
        return k / choose_tuning(rows, 1, n, k, gated=False, fine_sums=fine_sums).turns(k)

    assert all(longest(rows) <= 1024 for rows in range(1, 65))
    assert all(longest(rows, fine_sums=True) <= 1024 for rows in (100, 256, 1000, 1024, 8192, 16384))
    assert longest(8192) == k


@pytest.mark.parametrize(
    ("width", "units", "k_units", "k", "turns"),
    [
        (8, 1, 1, 1024, 1),
        (8, 1, 1, 1088, 17),  # 17 stages have no other divisor
        (8, 1, 1, 7168, 7),
        (8, 1, 4, 7168, 7),
        (8, 1, 4, 3584, 7),  # of two of its 14 stages: seven are too long
        (8, 1, 2, 3584, 4),
        (192, 1, 1, 2048, 2),
        (200, 1, 1, 2048, 1),  # more than half of 192 registers
        (96, 2, 1, 2048, 2),
        (104, 2, 1, 2048, 1),
    ],
)
def test_sums_are_as_short_as_registers_and_stages_allow(
    width: int, units: int, k_units: int, k: int, turns: int
) -> None:
    assert DenseTuning((width,), 1, units, 64, k_units, 2, 1).turns(k) == turns


@pytest.mark.parametrize(
    ("tuning", "gated", "reason"),
    [
        (DenseTuning((8,), 1, 1, 56, 1, 4, 1), False, "N=96 is not a multiple of 56"),
        (DenseTuning((8,), 1, 1, 24, 1, 4, 1), True, "does not hold as many of gate as of up"),
        (DenseTuning((8,), 1, 1, 48, 4, 4, 1), False, "K=128 is not a multiple of 256"),
        (DenseTuning((256,), 2, 2, 96, 1, 2, 1), False, "more than its warpgroups have registers for"),
        (DenseTuning((8,), 1, 1, 48, 2, 20, 1), False, "bytes of shared memory exceed"),
    ],
    ids=str,
)
def test_a_tuning_that_cannot_run_says_why(tuning: DenseTuning, gated: bool, reason: str) -> None:
    assert reason in str(tuning.reason_against(96, 128, gated, 1))


@pytest.mark.parametrize(
    ("widths", "warpgroups", "tile_rows", "stages"),
    [((), 2, 64, 4), ((12,), 2, 64, 4), ((8,), 5, 64, 4), ((264,), 2, 64, 4), ((8,), 2, 136, 4), ((8,), 2, 64, 1)],
)
def test_values_that_no_shape_could_use_are_refused(
    widths: tuple[int, ...], warpgroups: int, tile_rows: int, stages: int
) -> None:
    with pytest.raises(ValueError, match=r"widths|warpgroups|tile_rows"):
        DenseTuning(widths, warpgroups, 1, tile_rows, 1, stages, 1)
