"""Layers over two ranks against one device, with the same code on two GPUs and on two simulated devices.

It is also a program, for what needs processes of its own: XLA's flags, or a process a device. Each process compares its
own copy of the results with what its own device computes alone; a difference is an AssertionError and ends it.

python tests/two_ranks.py --sizes real --repeats 200                                   both devices, one process
python scripts/launch_hosts.py --processes 2 tests/two_ranks.py --sizes small --hosts  a device each
"""

import argparse
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from layers import random_arrays, small_config
from mesh_layers import CONFIG, Case, assert_equal_stages, distributions
from numerics import KERNEL_TOLERANCES
from ragged_contract import Transfer, make_transfer

from k3jax import K3Config, LoadOptions, MoE, MoEArrays
from k3jax.experts import RECIPES
from sharding import make_mesh

LAYOUTS = {
    "replicated-ep2": Case((1, 2, 1)),
    "replicated-tp2": Case((1, 1, 2)),
    "gather-ep2": Case((1, 2, 1), "sharded", LoadOptions(transport="all_gather")),
    "per-rank-ep2": Case((1, 2, 1), "sharded", LoadOptions(transport="per_rank")),
    "sharded-tp2": Case((1, 1, 2), "sharded"),
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A layer and how many tokens it gets, an odd number; `rows` and `columns` of bare exchanges."""

    config: K3Config
    tokens: int
    rows: int
    columns: int


SIZES = {
    "small": Sizes(CONFIG, tokens=21, rows=8, columns=3),
    "real": Sizes(
        small_config(
            hidden_size=2048,
            routed_expert_hidden_size=1024,
            moe_intermediate_size=1024,
            num_experts=64,
            num_experts_per_token=8,
        ),
        tokens=1023,
        rows=2048,
        columns=3584,
    ),
}


def require_equal_layers(sizes: Sizes, name: str, recipe: str) -> None:
    """Every stage over two ranks is one device's: for even, hot and skewed picks, and where one rank has no tokens."""
    case, x = LAYOUTS[name], _tokens(sizes)
    limit = max(case.limit, KERNEL_TOLERANCES[recipe].relative_l2 if jax.default_backend() == "gpu" else 0)
    alone = _on_one_device(sizes, recipe)
    for distribution, (weights, mask) in _distributions(sizes, recipe).items():
        layer = _over_two_ranks(sizes, case, recipe, weights)
        ours = jax.tree.map(_whole, _trace()(layer, x, mask))
        theirs = alone[distribution]
        # A GPU may sum a router's logit in another order for another number of tokens, and so turn a tie around.
        same = np.all(ours["expert_ids"] == theirs["expert_ids"], axis=1)
        assert same.mean() > 0.995, f"{distribution}: {np.count_nonzero(~same)} tokens have other picks"
        assert_equal_stages(_rows(ours, same), _rows(theirs, same), limit)


def require_repeatable(sizes: Sizes, name: str, recipe: str, repeats: int) -> None:
    """The same bits, however often."""
    weights, mask = _distributions(sizes, recipe)["skewed"]
    layer, x = _over_two_ranks(sizes, LAYOUTS[name], recipe, weights), _tokens(sizes)
    first = _trace()(layer, x, mask)
    different = [_different(_trace()(layer, x, mask), first) for _ in range(repeats)]
    wrong = [index for index, count in enumerate(different) if int(count)]
    assert not wrong, f"of {repeats} repeats {wrong} differ from the first run"


def transfers(sizes: Sizes) -> list[Transfer]:
    """What two ranks may send each other: some, all to one, nothing, in each format that rows travel in."""
    rows, columns = sizes.rows, sizes.columns
    some = np.array([[rows // 8, rows // 2 - 1], [rows // 4 + 1, 0]])
    to_one, nothing = np.array([[rows // 2, 0], [rows // 2, 0]]), np.zeros((2, 2), np.int64)
    formats: list[Any] = [np.float32, jnp.bfloat16, np.uint8, np.int32]
    return [make_transfer(some, columns, dtype, rows) for dtype in formats] + [
        make_transfer(each, columns, rows=rows) for each in (to_one, nothing)
    ]


def require_contract(transfer: Transfer, **how: Any) -> None:
    """What arrives is what the contract says, bit for bit."""
    found = transfer.run(make_mesh(expert=2), **how)
    np.testing.assert_array_equal(found.astype(np.float64), transfer.expected().astype(np.float64))


@functools.cache
def _trace() -> Any:
    # A CPU compiles twice as fast without; GPUs are to run what users run.
    options = {} if jax.default_backend() == "gpu" else {"xla_backend_optimization_level": "0"}
    return jax.jit(lambda layer, x, mask: layer.trace(x, mask), compiler_options=options)


@functools.cache
def _tokens(sizes: Sizes) -> np.ndarray:
    values = np.random.default_rng(7).standard_normal((sizes.tokens, sizes.config.hidden_size), np.float32)
    return values.astype(jnp.bfloat16)


@functools.cache
def _distributions(sizes: Sizes, recipe: str) -> dict[str, tuple[MoEArrays, np.ndarray]]:
    """Weights and a mask for each; arrays stay on this process's first device."""
    config = sizes.config
    found = distributions(random_arrays(config, recipe), sizes.tokens, config.experts_per_token)
    weights, _ = found.pop("zero")
    return found | {"one rank idle": (weights, np.arange(sizes.tokens) <= sizes.tokens // 2)}


@functools.cache
def _on_one_device(sizes: Sizes, recipe: str) -> dict[str, dict[str, np.ndarray]]:
    x, found = _tokens(sizes), {}
    for name, (weights, mask) in _distributions(sizes, recipe).items():
        layer = MoE(sizes.config, recipe=recipe, arrays=weights)
        found[name] = jax.tree.map(np.asarray, _trace()(layer, x, mask))
    return found


def _over_two_ranks(sizes: Sizes, case: Case, recipe: str, weights: MoEArrays) -> MoE:
    mesh = make_mesh(*case.sizes)
    return MoE(sizes.config, recipe=recipe, arrays=weights, mesh=mesh, tokens=case.tokens, options=case.options)


def _whole(array: jax.Array) -> np.ndarray:
    """All of a global array, in every process."""
    assert isinstance(array.sharding, NamedSharding)
    everywhere = jax.jit(lambda array: array, out_shardings=NamedSharding(array.sharding.mesh, PartitionSpec()))
    return np.asarray(everywhere(array).addressable_data(0))


def _rows(stages: dict[str, np.ndarray], chosen: np.ndarray) -> dict[str, Any]:
    return {stage: values[chosen] for stage, values in stages.items()}


@jax.jit
def _different(ours: Any, theirs: Any) -> jax.Array:
    """How many values differ in any bit."""

    def count(a: jax.Array, b: jax.Array) -> jax.Array:
        word = {2: jnp.uint16, 4: jnp.uint32}[a.dtype.itemsize]
        bits = (jax.lax.bitcast_convert_type(array, word) for array in (a, b))
        return jnp.sum(jnp.not_equal(*bits), dtype=jnp.int32)

    return sum(jax.tree.leaves(jax.tree.map(count, ours, theirs)), start=jnp.int32(0))


def main() -> None:
    """Everything that the tests of one process check, for the recipes and layouts named."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--sizes", choices=SIZES, default="small")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hosts", action="store_true", help="a device each, of processes that launch_hosts.py starts")
    arguments = parser.parse_args()
    if arguments.hosts:
        jax.distributed.initialize(heartbeat_timeout_seconds=60)
    assert jax.device_count() >= 2, jax.devices()
    sizes = SIZES[arguments.sizes]
    for transfer in transfers(sizes):
        require_contract(transfer)
    for recipe in arguments.recipes.split(","):
        for name in arguments.layouts.split(","):
            require_equal_layers(sizes, name, recipe)
            require_repeatable(sizes, name, recipe, arguments.repeats)
            print(f"{recipe} {name}: equal, and the same in {arguments.repeats} repeats", flush=True)


if __name__ == "__main__":
    main()
