"""The collectives of one MoE layer over a mesh, in the order of the data: what each rank puts in, and what it sends."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from k3jax.config import K3Config
from sharding import Layout
from sharding.dispatch import ReplicatedTokens, ShardedTokens
from sharding.traffic import Exchange
from sharding.transports import PerRank

_XLA_NAMES = {"uint8": "u8", "int32": "s32", "float32": "f32", "bfloat16": "bf16"}
_BYTES = {"u8": 1, "s32": 4, "f32": 4, "bf16": 2}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective over `ranks` ranks.

    Attributes:
        op: XLA's name. what: travels, in words. dtype, shape: what each rank puts in, the dtype by XLA's name.
        rows: for ragged ones, how many rows of its buffer a rank sends to others on average, picks being random.
        returns: whether it brings sums back, rather than something out.
    """

    op: str
    what: str
    dtype: str
    shape: tuple[int, ...]
    ranks: int
    rows: float | None = None
    returns: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:]) * _BYTES[self.dtype]

    @property
    def sent(self) -> float:
        """Bytes that a rank sends to others, as a ring does it; of a ragged one on average."""
        if self.rows is not None:
            return self.rows * self.row_bytes
        share = {"all-gather": self.ranks, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1}[self.op]
        return self.shape[0] * self.row_bytes * share * (self.ranks - 1) / self.ranks

    def sent_by(self, copies: NDArray[Any]) -> NDArray[Any]:
        """Bytes that each rank sends, where `copies [R, R]` rows go from one rank to another (`traffic.copies`)."""
        if self.rows is None:
            return np.full(len(copies), self.sent)
        return copies.sum(axis=0 if self.returns else 1) * float(self.row_bytes)


def layer_collectives(config: K3Config, layout: Layout, tokens: int) -> list[Collective]:
    """Those of a layer of recipe "bf16", "w4a16" or "w4a8" whose ranks begin with `tokens` tokens each.

    For a batch that is worked on in one chunk (`LoadOptions.max_tokens`); every chunk repeats what rows and sums need.
    """
    ranks = layout.ranks
    if isinstance(ranks, ShardedTokens):
        return [*_exchange(config, layout, ranks, tokens), *_shared(config, layout, ranks, tokens)]
    if not isinstance(ranks, ReplicatedTokens) or not ranks.mlp:
        return []
    columns = config.latent_size + (config.hidden_size if config.num_shared_experts else 0)
    return [Collective("all-reduce", "sums", ranks.wire, (tokens, columns), _size(layout, ranks.mlp), returns=True)]


def _exchange(config: K3Config, layout: Layout, ranks: ShardedTokens, tokens: int) -> Iterator[Collective]:
    """Rows to the ranks of their experts, sums back, and the sum over parts of the experts' width."""
    transport, picks, latent = ranks.transport, config.experts_per_token, config.latent_size
    parts = _encoded(ranks, tokens, latent) | {"ids": ("s32", (tokens, picks)), "weights": ("f32", (tokens, picks))}
    if isinstance(transport, PerRank):
        assert config.num_experts is not None
        count = transport.ranks
        leaving = tokens * Exchange(config.num_experts, picks, latent, count).rows("per_rank")
        yield Collective("all-to-all", "counts", "s32", (count, 2), count)
        for what, (dtype, (_, columns)) in parts.items():
            yield Collective("ragged-all-to-all", what, dtype, (tokens * min(count, picks), columns), count, leaving)
        back = (count * tokens, latent)
        yield Collective("ragged-all-to-all", "sums", ranks.wire, back, count, leaving, returns=True)
    elif transport is not None:
        count = transport.ranks
        for what, (dtype, shape) in parts.items():
            yield Collective("all-gather", what, dtype, shape, count)
        yield Collective("reduce-scatter", "sums", ranks.wire, (count * tokens, latent), count, returns=True)
    if ranks.width:
        width = _size(layout, ranks.width)
        yield Collective("all-reduce", "sums", ranks.wire, (tokens, latent), width, returns=True)


def _encoded(ranks: ShardedTokens, tokens: int, latent: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Rows as they travel: bfloat16, or bytes and scales."""
    rows = jax.ShapeDtypeStruct((tokens, latent), jnp.bfloat16)
    if ranks.encode is None:
        return {"rows": ("bf16", rows.shape)}
    coded = jax.eval_shape(ranks.encode, rows)
    return {"rows": ("u8", coded.values.shape), "scales": (_XLA_NAMES[coded.scales.dtype.name], coded.scales.shape)}


def _shared(config: K3Config, layout: Layout, ranks: ShardedTokens, tokens: int) -> Iterator[Collective]:
    """What shared experts need that are split over the ranks."""
    if not config.num_shared_experts:
        return
    count, hidden = _size(layout, ranks.gathered), config.hidden_size
    if ranks.gathered:
        yield Collective("all-gather", "tokens", "bf16", (tokens, hidden), count)
        yield Collective("reduce-scatter", "shared", ranks.wire, (count * tokens, hidden), count, returns=True)
    rest = tuple(axis for axis in ranks.mlp if axis not in ranks.gathered)
    if rest:
        yield Collective("all-reduce", "shared", ranks.wire, (tokens, hidden), _size(layout, rest), returns=True)


def _size(layout: Layout, axes: tuple[str, ...]) -> int:
    return math.prod(getattr(layout.sizes, axis) for axis in axes)
