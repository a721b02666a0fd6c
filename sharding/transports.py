"""How rows travel to the ranks of their experts and sums come back, where every rank has tokens of its own.

all_gather   every row to every rank, with its ids and weights; back by a reduce-scatter, which also adds
per_rank     one copy of a row to each rank that has an expert for it; back one sum of that rank's experts, which the
             row's own rank adds up, in the order of the ranks

Both take all rows there are: buffers have room for the worst case, every row to every rank.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import MXFP8Array, TokenScaledArray
from sharding.ragged import ragged_all_to_all
from sharding.traffic import Exchange

Encode = Callable[[Array], MXFP8Array | TokenScaledArray]
"""Makes rows smaller for the wire. What it gives must be exact in bfloat16, and encode to itself."""


def choose_transport(ranks: int, num_experts: int, picks: int, gpus_per_node: int = 8) -> str:
    """How the tokens of a group of `ranks` should travel: "all_gather" or "per_rank".

    One copy a (token, rank) is never more rows, but it has to exchange counts first, then copies unequal pieces, and
    packs rows twice: with K3's 16 of 896 experts it moves 89 % of the rows on 8 ranks, 65 % on 16, 40 % on 32. So it is
    chosen where it moves less than half, and only within a node: an all-gather brings a row into a node once, a copy a
    rank brings it once for each (docs/parallelism.md).
    """
    exchange = Exchange(num_experts, picks, columns=1, ranks=ranks)
    return "per_rank" if ranks <= gpus_per_node and exchange.hit_probability < 0.5 else "all_gather"


class Plan(NamedTuple):
    """Which rows this rank sends where, and what it gets. Rows to one rank lie together, rank after rank.

    Attributes:
        goes: whether token t goes to rank r. slot: where it lies among the rows to send; any number if it does not go.
        token: the token of each row to send. starts, sizes: where the rows to each rank begin, and how many they are.
        home: in the senders' buffers of rows, where those that come from each begin. arriving: how many come.
    """

    goes: Bool[Array, "t r"]
    slot: Int[Array, "t r"]
    token: Int[Array, " s"]
    starts: Int[Array, " r"]
    sizes: Int[Array, " r"]
    home: Int[Array, " r"]
    arriving: Int[Array, " r"]


@dataclasses.dataclass(frozen=True)
class AllGather:
    """Over `ranks` ranks along mesh `axes`."""

    axes: tuple[str, ...]
    ranks: int

    def plan(self, ids: Int[Array, "t x"], experts: int) -> None:
        """There is nothing to plan."""

    def send(self, rows: Array, plan: Plan | None) -> Array:
        """`[T, ...] -> [R T, ...]`, the ranks' in order."""
        return jax.lax.all_gather(rows, self.axes, tiled=True)

    def bring_back(self, sums: Float[Array, "n l"], plan: Plan | None) -> Float[Array, "t l"]:
        """`[R T, L] -> [T, L]` float32: all ranks' sums for this rank's tokens, added."""
        return jax.lax.psum_scatter(sums, self.axes, scatter_dimension=0, tiled=True).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class PerRank:
    """Over `ranks` ranks along mesh `axes`."""

    axes: tuple[str, ...]
    ranks: int

    def plan(self, ids: Int[Array, "t x"], experts: int) -> Plan:
        """From the tokens' global `ids`, where every rank has `experts`; ranks tell each other their counts."""
        tokens, picks = ids.shape
        owner = jnp.where(ids < 0, self.ranks, ids // experts)
        goes = jnp.any(owner[:, :, None] == jnp.arange(self.ranks, dtype=ids.dtype)[None, None, :], axis=1)
        sizes = jnp.sum(goes, axis=0, dtype=jnp.int32)
        starts = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
        slot = starts[None, :] + jnp.cumsum(goes, axis=0, dtype=jnp.int32) - 1
        most = tokens * min(self.ranks, picks)
        token = (
            jnp.zeros(most, jnp.int32)
            .at[jnp.where(goes, slot, most)]
            .set(jnp.arange(tokens, dtype=jnp.int32)[:, None], mode="drop")
        )
        told = jax.lax.all_to_all(jnp.stack([starts, sizes], axis=1), self.axes, 0, 0, tiled=True)
        return Plan(goes, slot, token, starts, sizes, told[:, 0], told[:, 1])

    def send(self, rows: Array, plan: Plan | None) -> Array:
        """`[T, ...] -> [R T, ...]`: what rank r sent begins at row `r T`; rows that none sent are 0, or -1 in ids."""
        assert plan is not None
        tokens = rows.shape[0]
        fill = -1 if rows.dtype == jnp.int32 else 0
        return ragged_all_to_all(
            rows[plan.token],
            jnp.full((self.ranks * tokens, *rows.shape[1:]), fill, rows.dtype),
            input_offsets=plan.starts,
            send_sizes=plan.sizes,
            output_offsets=jnp.full(self.ranks, jax.lax.axis_index(self.axes) * tokens, jnp.int32),
            recv_sizes=plan.arriving,
            axes=self.axes,
        )

    def bring_back(self, sums: Float[Array, "n l"], plan: Plan | None) -> Float[Array, "t l"]:
        """`[R T, L] -> [T, L]` float32: sums return to where their rows lay, and are added in the ranks' order."""
        assert plan is not None
        tokens = plan.goes.shape[0]
        back = ragged_all_to_all(
            sums,
            jnp.zeros((plan.token.shape[0], sums.shape[1]), sums.dtype),
            input_offsets=jnp.arange(self.ranks, dtype=jnp.int32) * tokens,
            send_sizes=plan.arriving,
            output_offsets=plan.home,
            recv_sizes=plan.sizes,
            axes=self.axes,
        )

        def add_rank(r: Array, total: Array) -> Array:
            there = jnp.where(plan.goes[:, r], plan.slot[:, r], 0)
            return total + jnp.where(plan.goes[:, r, None], back[there].astype(jnp.float32), 0.0)

        return jax.lax.fori_loop(0, self.ranks, add_rank, jnp.zeros((tokens, sums.shape[1]), jnp.float32))


Transport = AllGather | PerRank
TRANSPORTS: dict[str, type[AllGather] | type[PerRank]] = {"all_gather": AllGather, "per_rank": PerRank}


def send_rows(transport: Transport, rows: Array, plan: Any, encode: Encode | None) -> Array:
    """`transport.send(rows, plan)`; where `encode` is given, of encoded rows, which arrive as bfloat16 values of these.

    With `encode` it has no gradient.
    """
    if encode is None:
        return transport.send(rows, plan)
    coded = encode(rows)
    values = jax.lax.bitcast_convert_type(coded.values, jnp.uint8)
    arrived = jax.lax.bitcast_convert_type(transport.send(values, plan), coded.values.dtype)
    return type(coded)(arrived, transport.send(coded.scales, plan)).dequantize(jnp.bfloat16)
