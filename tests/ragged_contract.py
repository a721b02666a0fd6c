"""What a ragged all-to-all has to do, as the loop of its contract in NumPy, and one that is run over ranks."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.ragged import ragged_all_to_all

Exchange = Callable[..., jax.Array]
_SPEC = PartitionSpec("expert")


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Every rank's arrays, rank by rank. Rows to one rank lie after those to the ranks before it.

    Attributes:
        sizes: rows from each sender to each receiver, `[R, R]`. operands: `[R, N, ...]`. outputs: `[R, M, ...]`.
        places: where they go in each receiver's output, sender by receiver.
    """

    sizes: np.ndarray
    operands: np.ndarray
    outputs: np.ndarray
    places: np.ndarray

    def expected(self) -> np.ndarray:
        """The loop of the contract."""
        result = self.outputs.copy()
        for sender, row in enumerate(self.sizes):
            starts = np.cumsum(row) - row
            for receiver, (start, size) in enumerate(zip(starts, row, strict=True)):
                at = self.places[sender][receiver]
                result[receiver, at : at + size] = self.operands[sender, start : start + size]
        return result

    def run(self, mesh: Mesh, exchange: Exchange = ragged_all_to_all) -> np.ndarray:
        """By `exchange`, over the mesh's ranks of `expert`. Each process gives the ranks that it has their part."""
        offsets = (a.astype(np.int32) for a in (self.sizes, self.places, self.sizes.T))
        sharding = NamedSharding(mesh, _SPEC)
        arrays = [_place(given, sharding) for given in (self.operands, self.outputs, *offsets)]
        return np.asarray(_program(mesh, exchange)(*arrays).addressable_data(0))


def make_transfer(
    sizes: np.ndarray, columns: int = 3, dtype: jax.typing.DTypeLike = np.float32, rows: int = 0
) -> Transfer:
    """One of random numbers, in buffers of `rows` rows, or as many as are needed; outputs begin with sevens."""
    ranks = len(sizes)
    rows = rows or int(max(sizes.sum(axis=0).max(), sizes.sum(axis=1).max()))
    values = np.random.default_rng(ranks).integers(-100, 100, (ranks, rows, columns))
    outputs = np.full((ranks, rows, columns), 7)
    return Transfer(sizes, values.astype(dtype), outputs.astype(dtype), np.cumsum(sizes, axis=0) - sizes)


def _place(values: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


@functools.cache
def _program(mesh: Mesh, exchange: Exchange) -> Callable[..., jax.Array]:
    def run(operand: jax.Array, output: jax.Array, size: jax.Array, place: jax.Array, come: jax.Array) -> jax.Array:
        return exchange(
            operand[0],
            output[0],
            input_offsets=jnp.cumsum(size[0], dtype=jnp.int32) - size[0],
            send_sizes=size[0],
            output_offsets=place[0],
            recv_sizes=come[0],
            axes=("expert",),
        )[None]

    over_ranks = jax.shard_map(run, mesh=mesh, in_specs=_SPEC, out_specs=_SPEC, check_vma=False)
    return jax.jit(over_ranks, out_shardings=NamedSharding(mesh, PartitionSpec()))
