"""The Hopper kernel's schedule: every row of every group is worked on exactly once, at a width that holds it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul import schedule

SIZES = st.integers(0, 3000)
WIDEST = st.integers(1, 32).map(lambda steps: 8 * steps)


@given(size=SIZES, widest=WIDEST, columns=st.integers(1, 5))
def test_the_tiles_of_a_group_cover_each_of_its_rows_once_in_every_column_block(
    size: int, widest: int, columns: int
) -> None:
    seen = np.zeros((columns, size), int)
    for local in range(schedule.row_tiles(size, widest) * columns):
        column, first, rows = schedule.place(local, size, widest)
        assert 0 < rows <= widest
        assert first % schedule.ROW_STEP == 0
        seen[column, first : first + rows] += 1
    assert (seen == 1).all()


@given(size=SIZES, widest=WIDEST, columns=st.integers(1, 5), band=st.integers(1, 20))
def test_bands_change_only_the_order_of_a_group_s_tiles(size: int, widest: int, columns: int, band: int) -> None:
    tiles = range(schedule.row_tiles(size, widest) * columns)
    banded = [schedule.place_in_bands(local, size, widest, columns, band) for local in tiles]
    assert sorted(banded) == sorted(schedule.place(local, size, widest) for local in tiles)
    height = schedule.place(0, size, widest)[2] if size else 0
    for start in range(0, len(tiles), band * columns):  # but for the last, in which a band may be lower
        here = banded[start : start + band * columns]
        assert {first for _, first, _ in here} == {(start // columns + i) * height for i in range(len(here) // columns)}
        assert [column for column, _, _ in here] == sorted(column for column, _, _ in here)


@given(size=st.integers(1, 3000), widest=WIDEST)
def test_a_group_has_the_fewest_tiles_and_all_but_the_last_are_equal(size: int, widest: int) -> None:
    tiles = schedule.row_tiles(size, widest)
    assert (tiles - 1) * widest < size <= tiles * widest
    heights = [schedule.place(i, size, widest)[2] for i in range(tiles)]
    assert len(set(heights[:-1])) <= 1
    assert heights[-1] <= max(heights)


def test_an_empty_group_has_no_tile() -> None:
    assert schedule.row_tiles(0, 64) == 0


@given(widths=st.lists(st.integers(1, 32), min_size=1, unique=True).map(lambda v: tuple(8 * i for i in sorted(v))))
def test_the_narrowest_width_that_holds_the_rows_is_chosen(widths: tuple[int, ...]) -> None:
    for rows in range(1, widths[-1] + 1):
        chosen = widths[schedule.narrowest(rows, widths)]
        assert chosen == min(width for width in widths if width >= rows)


@settings(max_examples=25)
@given(size=st.integers(1, 3000), widest=WIDEST, data=st.data())
def test_traced_integers_give_what_python_integers_give(size: int, widest: int, data: st.DataObject) -> None:
    local = data.draw(st.integers(0, 3 * schedule.row_tiles(size, widest) - 1))
    widths = tuple(sorted({8, widest}))
    expected = schedule.place(local, size, widest)

    def traced(local: jax.Array, size: jax.Array) -> tuple[jax.Array, ...]:
        place = schedule.place(local, size, widest)
        return *place, schedule.narrowest(place[2], widths), *schedule.place_in_bands(local, size, widest, 3, 2)

    result = jax.jit(traced)(jnp.int32(local), jnp.int32(size))
    banded = schedule.place_in_bands(local, size, widest, 3, 2)
    assert tuple(int(v) for v in result) == (*expected, schedule.narrowest(expected[2], widths), *banded)


@pytest.mark.parametrize(
    ("size", "widest", "heights"), [(146, 152, [146]), (586, 152, [152, 152, 152, 130]), (9, 8, [8, 1])]
)
def test_heights_are_what_the_docstring_says(size: int, widest: int, heights: list[int]) -> None:
    tiles = schedule.row_tiles(size, widest)
    assert [schedule.place(i, size, widest)[2] for i in range(tiles)] == heights


PRICES = st.dictionaries(WIDEST, st.integers(1, 900), min_size=1, max_size=5).map(
    lambda costs: schedule.Prices(tuple(sorted(costs)), tuple(costs[width] for width in sorted(costs)))
)
LAUNCHES = st.lists(PRICES, min_size=1, max_size=4).map(tuple)


@settings(max_examples=50)
@given(size=st.integers(0, 3000), launches=LAUNCHES)
def test_a_group_is_the_launch_s_whose_tiles_cost_least(size: int, launches: tuple[schedule.Prices, ...]) -> None:
    costs = []
    for prices in launches:
        tiles = [schedule.place(i, size, prices.widths[-1])[2] for i in range(-(-size // prices.widths[-1]))]
        highest = max(tiles, default=0)
        each = next(cost for width, cost in zip(*prices, strict=True) if width >= highest)
        costs.append(len(tiles) * each)
    chosen = schedule.cheapest(size, launches)
    assert costs[chosen] == min(costs)
    assert min(costs) not in costs[:chosen]
    assert int(schedule.cheapest(jnp.int32(size), launches)) == chosen
