"""The kernels that gather rows and add them up, on a GPU. Run with `pytest -m gpu` where JAX sees one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_same_bits

from pallas_kernels import (
    after,
    combine_rows,
    gather_rows,
    quantize_fp8_token,
    quantize_mxfp8,
    schedule_rows,
    spread_rows,
)

pytestmark = pytest.mark.gpu
KERNELS = ("mosaic", "triton")


@pytest.mark.parametrize(("tokens", "slots", "columns"), [(1, 16, 3584), (7, 3, 40), (1024, 16, 3584), (5, 40, 72)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_sums_equal_the_loops_and_read_nothing_else(kernel: str, tokens: int, slots: int, columns: int) -> None:
    rng = np.random.default_rng(tokens)
    positions = rng.permutation(tokens * slots + 9)[: tokens * slots].reshape(tokens, slots).astype(np.int32)
    positions.reshape(-1)[1::5] = -1
    rows = np.full((tokens * slots + 9, columns), np.nan, np.float32)
    rows[positions[positions >= 0]] = rng.standard_normal((int((positions >= 0).sum()), columns))
    weights = np.where(positions < 0, np.nan, rng.standard_normal(positions.shape)).astype(np.float32)
    given = jnp.asarray(rows).astype(jnp.bfloat16), jnp.asarray(positions), jnp.asarray(weights)
    sums = np.zeros((tokens, columns))
    for t, k in zip(*np.nonzero(positions >= 0), strict=True):
        sums[t] += np.asarray(given[0][positions[t, k]], np.float64) * weights[t, k]
    first = combine_rows(*given, implementation=kernel)
    np.testing.assert_allclose(first, sums, rtol=1e-5, atol=1e-5)
    for _ in range(20):
        assert_same_bits(combine_rows(*given, implementation=kernel), first)


@pytest.mark.parametrize(
    ("tokens", "picks", "columns"), [(1, 16, 3584), (9, 3, 64), (1024, 16, 3584), (8192, 16, 3584)]
)
@pytest.mark.parametrize("form", ["bf16", "mxfp8", "fp8_token"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_are_their_tokens(kernel: str, form: str, tokens: int, picks: int, columns: int) -> None:
    """Any bits, NaNs and subnormals too; slots without a group have no row."""
    if (kernel, form, columns) == ("mosaic", "mxfp8", 64):
        columns = 128  # whose scales are a word
    keys = jax.random.split(jax.random.key(tokens))
    x: Any = jax.lax.bitcast_convert_type(jax.random.bits(keys[0], (tokens, columns), jnp.uint16), jnp.bfloat16)
    if form != "bf16":
        x = {"mxfp8": quantize_mxfp8, "fp8_token": quantize_fp8_token}[form](x)
    schedule = schedule_rows(jax.random.randint(keys[1], (tokens, picks), -1, 112), 112)
    rows = gather_rows(x, schedule, implementation=kernel)
    held = int(schedule.group_sizes.sum())
    jax.tree.map(lambda row, token: assert_same_bits(row[:held], token[schedule.token[:held]]), rows, x)


@pytest.mark.parametrize(
    ("tokens", "picks", "groups"),
    [
        (1, 1, 1),
        (1, 16, 896),
        (8, 16, 112),
        (64, 16, 112),
        (256, 16, 896),
        (151, 16, 300),
        (1031, 3, 300),
        (1024, 16, 112),
        (1024, 16, 896),
        (2731, 7, 5),
        (8192, 16, 112),
    ],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_slots_sorted_in_one_kernel(kernel: str, tokens: int, picks: int, groups: int) -> None:
    """Ids of no group, negative and beyond, come last; where tokens pick at random, and where all pick the same."""
    if kernel == "triton" and tokens * picks > 4096:
        with pytest.raises(NotImplementedError, match="quick up to 4096"):
            schedule_rows(jnp.zeros((tokens, picks), jnp.int32), groups, implementation=kernel)
        return
    ids = jax.random.randint(jax.random.key(tokens), (tokens, picks), -2, groups + 2)
    ids = ids.at[0, 0].set(jnp.iinfo(jnp.int32).min).at[-1, -1].set(jnp.iinfo(jnp.int32).max)
    for given in (ids, jnp.full_like(ids, groups - 1), jnp.full_like(ids, -1)):
        other = schedule_rows(given, groups, implementation="xla")
        for _ in range(5):
            jax.tree.map(assert_same_bits, schedule_rows(given, groups, implementation=kernel), other)


@pytest.mark.parametrize("groups", [112, 896])
@pytest.mark.parametrize("tokens", [1, 8, 128])
@pytest.mark.parametrize("form", ["bf16", "mxfp8", "fp8_token"])
def test_a_few_slots_are_spread_out_as_by_one_op_after_the_other(form: str, tokens: int, groups: int) -> None:
    """Picked at random, masked in part, all of one group and all of none; NaNs, infinities and zeros among tokens."""
    keys = jax.random.split(jax.random.key(tokens), 3)
    sizes = jnp.exp2(jax.random.uniform(keys[1], (tokens, 1), minval=-40, maxval=40))
    x = jax.random.normal(keys[0], (tokens, 3584)) * sizes
    special = jnp.asarray([jnp.nan, jnp.inf, 0.0])[: tokens // 2]
    x = x.at[: len(special), 7].set(special).at[tokens // 2, 32:].set(0).astype(jnp.bfloat16)
    ids = jax.random.randint(keys[2], (tokens, 16), -groups // 8, groups)
    spread, other = (
        jax.jit(functools.partial(spread_rows, groups=groups, out_format=form, implementation=name))
        for name in ("mosaic", "xla")
    )
    for given in (ids, jnp.maximum(ids, 0), jnp.full_like(ids, groups - 1), jnp.full_like(ids, -1)):
        schedule, rows = other(x, given)
        held = int(schedule.group_sizes.sum())
        for _ in range(5):
            mine = spread(x, given)
            jax.tree.map(assert_same_bits, mine[0], schedule)
            jax.tree.map(lambda a, b: assert_same_bits(a[:held], b[:held]), mine[1], rows)  # noqa: B023


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_batch_of_schedules(kernel: str) -> None:
    ids = jax.random.randint(jax.random.key(0), (3, 40, 5), -1, 8)
    mine, other = (jax.vmap(lambda i, n=name: schedule_rows(i, 7, implementation=n))(ids) for name in (kernel, "xla"))
    jax.tree.map(assert_same_bits, mine, other)


@pytest.mark.parametrize("shape", [(8,), (1, 7168), (64, 7168), (3, 5, 344)], ids=str)
def test_what_waits_is_the_same_to_the_bit_and_in_a_batch(shape: tuple[int, ...]) -> None:
    x = jax.lax.bitcast_convert_type(jax.random.bits(jax.random.key(0), shape, jnp.uint16), jnp.bfloat16)
    earlier = jnp.full((3, 5), jnp.nan)
    for y in (after(x, earlier, implementation="mosaic"), jax.jit(after)(x, earlier)):
        assert_same_bits(y, x)
    batch = jnp.stack([x, jnp.roll(x, 1)])
    for along in (None, 0):
        y = jax.vmap(lambda x, earlier: after(x, earlier, implementation="mosaic"), (0, along))(batch, earlier[:2])
        assert_same_bits(y, batch)
    (dx,) = jax.vjp(lambda x: after(x, earlier, implementation="mosaic"), x)[1](x)
    assert_same_bits(dx, x)
