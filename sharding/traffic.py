"""What moving rows to experts and back costs: a model, in bytes and in seconds, of layouts with sharded tokens.

R ranks each have T tokens of their own and E / R of the E experts; every token picks X experts, all picks equally
likely. Per token and layer, its own rank sends, and later gets back, this many rows:

all_gather   R - 1              every row to every rank; back by a reduce-scatter, which moves as much
per_rank     (R - 1) p          a copy to each rank that holds a pick; back one sum of that rank's experts
per_expert   X (R - 1) / R      a copy a pick: what neither transport of this package does

p = 1 - C(E - E/R, X) / C(E, X) is the chance that a given rank holds at least one of the X picks.
"""

import dataclasses
import math
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Transport = Literal["all_gather", "per_rank", "per_expert"]
TRANSPORTS: tuple[Transport, ...] = ("all_gather", "per_rank", "per_expert")

ELEMENT_BYTES = {"bf16": 2.0, "f32": 4.0, "mxfp8": 1 + 1 / 32}
"""Bytes an element on the wire; MXFP8 has a scale a block of 32."""

_PICK_BYTES = 8  # an int32 id and a float32 weight, which travel with the row


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Rows of `columns` elements between `ranks`, which hold `num_experts`; tokens pick `picks` of these each.

    Attributes:
        out: format of the rows on their way to the experts. back: of the sums on their way home.

    Raises:
        ValueError: the ranks cannot have equal numbers of experts, or a format is unknown.
    """

    num_experts: int
    picks: int
    columns: int
    ranks: int
    out: str = "bf16"
    back: str = "bf16"

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.num_experts % self.ranks:
            raise ValueError(f"Exchange: {self.num_experts} experts cannot be split evenly over ranks={self.ranks}")
        if not 1 <= self.picks <= self.num_experts:
            raise ValueError(f"Exchange: picks={self.picks} must be between 1 and {self.num_experts} experts")
        for name in (self.out, self.back):
            if name not in ELEMENT_BYTES:
                raise ValueError(f"Exchange: format {name!r} is not one of {', '.join(ELEMENT_BYTES)}")

    @property
    def hit_probability(self) -> float:
        """p: how likely it is that a given rank holds at least one of a token's picks."""
        everywhere = math.comb(self.num_experts, self.picks)
        elsewhere = math.comb(self.num_experts - self.num_experts // self.ranks, self.picks)
        return (everywhere - elsewhere) / everywhere

    def rows(self, transport: Transport, others: int | None = None) -> float:
        """Rows that one token sends to `others` of the other ranks (None: to all of them), and gets back."""
        others = self.ranks - 1 if others is None else others
        each = {"all_gather": 1.0, "per_rank": self.hit_probability, "per_expert": self.picks / self.ranks}
        return others * each[transport]

    @property
    def out_row(self) -> float:
        """Bytes of a row on its way out, with the token's picks and their weights."""
        return self.columns * ELEMENT_BYTES[self.out] + self.picks * _PICK_BYTES

    @property
    def back_row(self) -> float:
        """Bytes of a row on its way home."""
        return self.columns * ELEMENT_BYTES[self.back]

    def bytes(self, transport: Transport) -> float:
        """Bytes that a rank sends for each of its tokens, out and back together; it receives as many."""
        return self.rows(transport) * (self.out_row + self.back_row)


def copies(holders: NDArray[Any], shard: int, ranks: int) -> NDArray[Any]:
    """Rows that `per_rank` sends under a given routing: `[R, R]`, from a token's rank to one that holds a pick of it.

    Args:
        holders: `[T, X]`, the rank that holds each pick of each token, -1 for none. Rank r has the r-th `shard` tokens.
    """
    own = np.arange(len(holders)) // shard
    found = np.zeros((ranks, ranks), np.int64)
    for holder in range(ranks):
        np.add.at(found[:, holder], own, (holders == holder).any(axis=1))
    np.fill_diagonal(found, 0)  # what stays on its rank does not travel
    return found


@dataclasses.dataclass(frozen=True)
class Fabric:
    """How fast one GPU sends, in bytes a second: `link` within its node of `node` GPUs, `network` to other nodes."""

    node: int
    link: float
    network: float


def seconds(exchange: Exchange, transport: Transport, fabric: Fabric) -> float:
    """Time on the wire for one token of every rank: the slower of the links and the network, at their full rates.

    Collectives that reach all ranks run as rings, one through each GPU's network port, so that a row enters a node
    once and goes from GPU to GPU within it; copies to single ranks each take their sender's port.
    """
    row = exchange.out_row + exchange.back_row
    inside = min(exchange.ranks, fabric.node) - 1
    outside = exchange.ranks - 1 - inside
    if transport == "all_gather":
        moved = exchange.rows(transport) * row
        return max(moved / fabric.link, moved / (fabric.node * fabric.network) if outside else 0.0)
    within, across = (exchange.rows(transport, others) * row for others in (inside, outside))
    return max(within / fabric.link, across / fabric.network)


def crossover_tokens(exchange: Exchange, fabric: Fabric, overhead: float) -> float:
    """From how many tokens a rank `per_rank` is faster than `all_gather`; infinity where it never is.

    Args:
        overhead: seconds that `per_rank` takes more whatever the number of tokens: it must exchange counts first, and
            pack and unpack rows.
    """
    saved = seconds(exchange, "all_gather", fabric) - seconds(exchange, "per_rank", fabric)
    return overhead / saved if saved > 0 else math.inf


def all_reduce_bytes(columns: int, ranks: int, element: str = "bf16") -> float:
    """Bytes a token that a rank sends where tokens are replicated: one ring all-reduce of `columns` elements."""
    return 2 * (ranks - 1) / ranks * columns * ELEMENT_BYTES[element]
