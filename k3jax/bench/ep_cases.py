"""What `k3jax bench --op ep` times, as plain data: a layer over ranks, and the bytes that its tokens make them send."""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3jax.bench.layer_cases import LayerCase
from k3jax.config import K3Config
from k3jax.inspection.collectives import layer_collectives
from sharding import Layout
from sharding.traffic import copies

TRANSPORTS = ("all_gather", "per_rank")
ONE_DEVICE_TOKENS = 8192
"""How many tokens one device gets at a time; more are given in parts of equal size."""


@dataclasses.dataclass(frozen=True)
class EpCase:
    """`layer`, of which each of `ranks` has as many experts, with `tokens` tokens on each rank."""

    layer: LayerCase
    ranks: int
    tokens: int

    def __post_init__(self) -> None:
        assert self.layer.groups % self.ranks == 0
        assert self.layer.tokens == self.ranks * self.tokens

    @property
    def parts(self) -> tuple[slice, ...]:
        """The tokens of all ranks as one device gets them."""
        count = -(-self.layer.tokens // ONE_DEVICE_TOKENS)
        size = -(-self.layer.tokens // count)
        return tuple(slice(start, start + size) for start in range(0, self.layer.tokens, size))


@dataclasses.dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends, the mean of all ranks: with rows to experts, and with sums on their way back."""

    dispatch: float
    combine: float


def bytes_sent(ids: NDArray[Any], config: K3Config, layout: Layout) -> Sent:
    """Under the picks `ids [R T, X]` of sharded tokens."""
    assert config.num_experts is not None
    ranks = layout.sizes.expert
    tokens = len(ids) // ranks
    travelled = copies(ids // (config.num_experts // ranks), tokens, ranks)
    sent = dict.fromkeys((False, True), 0.0)
    for collective in layer_collectives(config, layout, tokens):
        sent[collective.returns] += float(np.mean(collective.sent_by(travelled)))
    return Sent(sent[False], sent[True])
