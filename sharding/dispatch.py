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

from pallas_kernels.rounding import to_bfloat16

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
    def splits_width(self) -> bool:
        """Whether each rank has only a part of its experts' width F, so that their outputs are parts of sums."""
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

    def total(self, *parts: Float[Array, "..."] | None) -> tuple[Any, ...]:
        """Sums over ranks, float32: of the experts' `[T, L]`, and of the split MLP's `[N, D]`; None stays None."""
        return parts


@dataclasses.dataclass(frozen=True)
class ReplicatedTokens(Ranks):
    """Every rank has all tokens and adds what its experts, and its part of their width, contribute.

    Attributes:
        experts, width: the mesh axes that split the experts and their F. mlp: those that split an MLP's width.
        wire: the format of partial sums on the wire.
    """

    experts: tuple[str, ...]
    width: tuple[str, ...]
    mlp: tuple[str, ...]
    wire: str

    @property
    def splits_width(self) -> bool:
        return bool(self.width)

    def widest(self, amax: Float[Array, "..."]) -> Float[Array, "..."]:
        return _pmax(amax, self.width) if self.width else amax

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
