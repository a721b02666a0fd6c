"""Slots sorted by their groups, against NumPy's stable sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import schedule_rows


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(("tokens", "picks", "groups"), [(1, 1, 1), (9, 4, 5), (40, 3, 200)])
def test_slots_in_the_order_of_their_groups(tokens: int, picks: int, groups: int, implementation: str) -> None:
    """Ids of no group, negative or too large, come last; a token may pick a group twice."""
    ids = np.random.default_rng(tokens).integers(-2, groups + 2, (tokens, picks)).astype(np.int32)
    group = np.where((ids >= 0) & (ids < groups), ids, groups).reshape(-1)
    order = np.argsort(group, kind="stable")
    got = schedule_rows(jnp.asarray(ids), groups, implementation=implementation)
    np.testing.assert_array_equal(got.token, order // picks)
    np.testing.assert_array_equal(got.group_sizes, np.bincount(group, minlength=groups + 1)[:groups])
    row = np.argsort(order, kind="stable")
    np.testing.assert_array_equal(got.row, np.where(group < groups, row, -1).reshape(tokens, picks))


def test_no_slot_and_a_batch() -> None:
    for implementation in (None, "reference"):
        nothing = schedule_rows(jnp.zeros((0, 3), jnp.int32), 4, implementation=implementation)
        assert (nothing.token.shape, nothing.row.shape, nothing.group_sizes.tolist()) == ((0,), (0, 3), [0] * 4)
    ids = jnp.asarray([[[2, 0], [1, 2]], [[-1, 0], [0, 0]]], jnp.int32)
    batch = jax.vmap(lambda ids: schedule_rows(ids, 3))(ids)
    np.testing.assert_array_equal(batch.row, [[[2, 0], [1, 3]], [[-1, 0], [1, 2]]])
