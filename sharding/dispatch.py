"""What moves between ranks while a layer runs. Rows come and go; what experts make of them is not known here.

A layer's body is the same everywhere and calls, in this order:

arrived = ranks.dispatch(rows, ids, weights)     the rows that this rank's experts work on, and which of these
sums    = ranks.combine(sums, arrived)           what came of them, for the tokens that this rank began with
x       = ranks.gather(x)                        the tokens that a split MLP works on
...     = ranks.total(sums, shared)              whatever is still a part of a sum over ranks, added up

Inside `shard_map`, over the mesh axes that the rules name; on one device each of them does nothing.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import after
from pallas_kernels.rounding import to_bfloat16
from sharding.transports import Encode, Transport, send_rows

WIRES = ("f32", "bf16")


class Arrived(NamedTuple):
    """Rows for this rank's experts: `rows [N, L]`, `ids [N, X]` among its own experts (-1: none), `weights [N, X]`.

    `home` is what `combine` needs to bring their sums back.
    """

    rows: Array
    ids: Int[Array, "n x"]
    weights: Float[Array, "n x"]
    home: Any = None


@dataclasses.dataclass(frozen=True)
class Ranks:
    """One device: nothing moves."""

    @property
    def alone(self) -> bool:
        """Whether there are no other ranks to wait for."""
        return True

    @property
    def meeting(self) -> int:
        """How many ranks' tokens meet where experts work."""
        return 1

    @property
    def encodes(self) -> bool:
        """Whether rows are encoded on the wire, so that `dispatch` has no gradient."""
        return False

    def unencoded(self) -> "Ranks":
        """The same ranks, with rows in bfloat16 on the wire."""
        return self

    @property
    def splits_width(self) -> bool:
        """Whether each rank has only a part of its experts' width F, so that their outputs are parts of sums."""
        return False

    @property
    def splits_mlp(self) -> bool:
        """Whether each rank has only a part of an MLP's width, so that what it computes is a part of a sum."""
        return False

    def widest(self, amax: Float[Array, "..."]) -> Float[Array, "..."]:
        """The maximum over the ranks that hold parts of the same experts' width."""
        return amax

    def dispatch(
        self, rows: Float[Array, "t l"], ids: Int[Array, "t x"], weights: Float[Array, "t x"], experts: int
    ) -> Arrived:
        """Brings rows to the ranks of their experts, of which every rank has `experts`."""
        return Arrived(rows, ids, weights)

    def combine(self, sums: Float[Array, "n l"], arrived: Arrived) -> Float[Array, "t l"]:
        """Brings float32 sums back to where `dispatch` took their rows from."""
        return sums

    def gather(self, x: Float[Array, "t d"]) -> Float[Array, "n d"]:
        """The tokens on which the ranks that split an MLP work together."""
        return x

    def after(self, rows: Float[Array, "t l"], x: Float[Array, "n d"]) -> Float[Array, "n d"]:
        """`x`, for work that must not keep `rows` from setting out."""
        return x if x is rows else after(x, rows)

    def total(self, *parts: Float[Array, "..."] | None) -> tuple[Any, ...]:
        """Sums over ranks, float32: of the experts' `[T, L]`, and of a split MLP's `[N, D]`; others, and None, stay."""
        return parts


@dataclasses.dataclass(frozen=True)
class RanksOfAMesh(Ranks):
    """What the layouts of tokens have in common.

    Attributes:
        width: the mesh axes that split the experts' F. mlp: those that split an MLP's width.
        wire: the format of partial sums on the wire.
    """

    width: tuple[str, ...]
    mlp: tuple[str, ...]
    wire: str

    @property
    def alone(self) -> bool:
        return False

    @property
    def splits_width(self) -> bool:
        return bool(self.width)

    @property
    def splits_mlp(self) -> bool:
        return bool(self.mlp)

    def widest(self, amax: Float[Array, "..."]) -> Float[Array, "..."]:
        return _pmax(amax, self.width) if self.width else amax


@dataclasses.dataclass(frozen=True)
class ReplicatedTokens(RanksOfAMesh):
    """Every rank has all tokens and adds what its experts, and its part of their width, contribute.

    Attributes:
        experts: the mesh axes that split the experts.
    """

    experts: tuple[str, ...]

    def dispatch(
        self, rows: Float[Array, "t l"], ids: Int[Array, "t x"], weights: Float[Array, "t x"], experts: int
    ) -> Arrived:
        return Arrived(rows, own_ids(ids, self.experts, experts), weights)

    def total(self, *parts: Float[Array, "..."] | None) -> tuple[Any, ...]:
        """One all-reduce of the parts side by side."""
        if not self.mlp:
            return parts
        present = [part for part in parts if part is not None]
        stops = np.cumsum([part.shape[-1] for part in present])[:-1].tolist()
        side_by_side = to_wire(jnp.concatenate(present, axis=-1), self.wire)
        summed = jax.lax.psum(side_by_side, self.mlp).astype(jnp.float32)
        found = iter(jnp.split(summed, stops, axis=-1))
        return tuple(None if part is None else next(found) for part in parts)


@dataclasses.dataclass(frozen=True)
class ShardedTokens(RanksOfAMesh):
    """Every rank has tokens of its own: their rows travel to the ranks of their experts, and sums back.

    Attributes:
        transport: between the ranks that split the experts; None if all experts are on every rank.
        gathered: those axes of `mlp` along which tokens differ.
        encode: of rows on their way to the experts, None for bfloat16.
    """

    transport: Transport | None
    gathered: tuple[str, ...]
    encode: Encode | None = None

    @property
    def meeting(self) -> int:
        return self.transport.ranks if self.transport else 1

    @property
    def encodes(self) -> bool:
        return self.encode is not None and self.transport is not None

    def unencoded(self) -> "ShardedTokens":
        return dataclasses.replace(self, encode=None)

    def dispatch(
        self, rows: Float[Array, "t l"], ids: Int[Array, "t x"], weights: Float[Array, "t x"], experts: int
    ) -> Arrived:
        transport = self.transport
        if transport is None:
            return Arrived(rows, ids, weights)
        plan = transport.plan(ids, experts)
        rows = send_rows(transport, rows, plan, self.encode)
        ids = own_ids(transport.send(ids, plan), transport.axes, experts)
        return Arrived(rows, ids, transport.send(weights, plan), plan)

    def combine(self, sums: Float[Array, "n l"], arrived: Arrived) -> Float[Array, "t l"]:
        if self.transport is not None:
            sums = self.transport.bring_back(to_wire(sums, self.wire), arrived.home)
        return self._sum(sums, self.width)

    def gather(self, x: Float[Array, "t d"]) -> Float[Array, "n d"]:
        return jax.lax.all_gather(x, self.gathered, tiled=True) if self.gathered else x

    def after(self, rows: Float[Array, "t l"], x: Float[Array, "n d"]) -> Float[Array, "n d"]:
        """Without the barrier XLA makes one product of the rows' and of an MLP's first, four times as long."""
        return x if self.transport is None else jax.lax.optimization_barrier((rows, x))[1]

    def total(self, *parts: Float[Array, "..."] | None) -> tuple[Any, ...]:
        """The experts' sums are whole already. The MLP's are scattered to their tokens' ranks and added."""
        sums, mlp = parts if len(parts) > 1 else (*parts, None)
        if mlp is not None and self.gathered:
            if sums is not None:  # or XLA makes one collective of both scatters, and what needs one waits for the other
                mlp = jax.lax.optimization_barrier((sums, mlp))[1]
            mlp = jax.lax.psum_scatter(to_wire(mlp, self.wire), self.gathered, scatter_dimension=0, tiled=True)
            mlp = mlp.astype(jnp.float32)
        if mlp is not None:
            mlp = self._sum(mlp, tuple(axis for axis in self.mlp if axis not in self.gathered))
        return (sums, mlp)[: len(parts)]

    def _sum(self, sums: Float[Array, "..."], axes: tuple[str, ...]) -> Float[Array, "..."]:
        return jax.lax.psum(to_wire(sums, self.wire), axes).astype(jnp.float32) if axes else sums


def own_ids(ids: Int[Array, "t x"], axes: tuple[str, ...], experts: int) -> Int[Array, "t x"]:
    """Ids counted from this rank's first expert; -1 for the experts of other ranks."""
    if not axes:
        return ids
    own = ids - jax.lax.axis_index(axes) * experts
    return jnp.where((own >= 0) & (own < experts), own, -1)


def _pmax(x: Float[Array, "..."], axes: tuple[str, ...]) -> Float[Array, "..."]:
    """The maximum over ranks of `x >= 0`, by its bits: those of a NaN are the largest."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & 0x7FFF_FFFF
    return jax.lax.bitcast_convert_type(jax.lax.pmax(bits, axes), jnp.float32)


def to_wire(sums: Float[Array, "..."], wire: str) -> Float[Array, "..."]:
    """Float32 partial sums as they travel."""
    assert wire in WIRES, wire
    return to_bfloat16(sums) if wire == "bf16" else sums
