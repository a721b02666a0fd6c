"""What each rank of a mesh does with a batch: its tokens, the rows its experts compute, and the bytes it sends."""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3jax.config import K3Config
from k3jax.inspection.collectives import layer_collectives
from sharding import Layout
from sharding.traffic import copies


@dataclasses.dataclass(frozen=True)
class RankLoad:
    """One rank, by its place on the mesh.

    Attributes:
        tokens: that it begins with; where tokens are replicated, the ranks of one `data` group have the same.
        rows: that its experts compute; ranks along `tensor` compute a part of each.
        bytes_sent: by its collectives (`k3jax.inspection.collectives`), under this routing.
    """

    data: int
    expert: int
    tensor: int
    tokens: int
    rows: int
    bytes_sent: int


RANK_HEADINGS = ("data", "expert", "tensor", "tokens", "rows", "kB sent")


def rank_cells(load: RankLoad) -> tuple[str, ...]:
    """A rank in words, under RANK_HEADINGS."""
    numbers = (load.data, load.expert, load.tensor, load.tokens, load.rows)
    return (*(f"{number:,}" for number in numbers), f"{load.bytes_sent / 1000:,.1f}")


def rank_loads(ids: NDArray[Any], config: K3Config, layout: Layout) -> tuple[RankLoad, ...]:
    """Every rank's load under the picks `ids [T, X]` (-1: none), in the mesh's order; none without a mesh."""
    if layout.mesh is None:
        return ()
    assert config.num_experts is not None
    sizes = layout.sizes
    shard = max(-(-len(ids) // layout.token_shards), 1)
    group = shard * layout.token_shards // sizes.data  # tokens of a data group
    holders = np.where(ids >= 0, ids // (config.num_experts // sizes.expert), -1)
    loads = []
    for data in range(sizes.data):
        own = holders[data * group : (data + 1) * group]
        rows = np.bincount(own[own >= 0], minlength=sizes.expert).tolist()
        sends = _sent(own, shard, config, layout)
        for expert in range(sizes.expert):
            before = 0 if shard == group else expert * shard
            tokens = min(max(len(own) - before, 0), shard)
            loads += [
                RankLoad(data, expert, tensor, tokens, rows[expert], round(sends[expert]))
                for tensor in range(sizes.tensor)
            ]
    return tuple(loads)


def _sent(holders: NDArray[Any], shard: int, config: K3Config, layout: Layout) -> NDArray[Any]:
    """Bytes that each rank of `expert` sends for the tokens of its group."""
    sent = np.zeros(layout.sizes.expert)
    travelled = copies(holders, shard, layout.sizes.expert)
    for collective in layer_collectives(config, layout, shard):
        sent += collective.sent_by(travelled)
    return sent
