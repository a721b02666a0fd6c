"""The MoE layer compiled for eight GPUs that are not there: which collectives, how many bytes, what waits for what."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from annotations import unchecked_annotations
from hlo import Collective, Program
from jax.sharding import Mesh, NamedSharding

from k3jax import K3Config, MoE
from k3jax.inspection.collectives import layer_collectives
from k3jax.inspection.dispatch_memory import dispatch_memory
from k3jax.moe_arrays import MoEArrays
from k3jax.options import DEFAULTS, LoadOptions
from sharding import Layout, MeshSizes, make_mesh, partition_spec

CONFIG = K3Config.from_pretrained(Path(__file__).parents[1] / "data" / "k3-config.json")
TOKENS = 1024  # that each rank works on
LATENCY_HIDING = {"xla_gpu_enable_latency_hiding_scheduler": True}


@dataclasses.dataclass(frozen=True)
class Case:
    """One compilation, with XLA's latency hiding scheduler where `hides_latency`; its default is not to."""

    gpu: str
    tokens: str
    recipe: str = "w4a16"
    options: LoadOptions = DEFAULTS
    hides_latency: bool = False
    implementation: str = "xla"

    def __str__(self) -> str:
        options = self.options.transport or "", "split shared" * self.options.split_shared
        return " ".join(filter(None, (self.gpu, self.implementation, self.tokens, self.recipe, *options)))


ALL_GATHER, PER_RANK = LoadOptions(transport="all_gather"), LoadOptions(transport="per_rank")
SPLIT = LoadOptions(transport="all_gather", split_shared=True, wire="bf16")
CASES = [
    Case("hopper", "replicated"),
    Case("hopper", "sharded", options=PER_RANK, hides_latency=True),
    Case("hopper", "sharded", options=SPLIT),
    Case("hopper", "sharded", options=ALL_GATHER, implementation="mosaic"),
    Case("blackwell", "replicated"),
    Case("blackwell", "sharded", "w4a8", options=ALL_GATHER),
    Case("blackwell", "sharded", "w4a8", options=PER_RANK, hides_latency=True),
]


@pytest.fixture(scope="module")
def mesh_of(gpus: Any) -> Any:
    """`mesh_of("hopper")`: eight ranks of `expert`."""
    return lambda gpu: make_mesh(expert=8, devices=gpus(gpu, 8))


def compiled(case: Case, mesh: Mesh, config: K3Config = CONFIG) -> tuple[Any, Layout]:
    """The layer, as the GPUs of `mesh` would run it: what XLA compiled, and the layout."""
    with unchecked_annotations():
        arrays = MoEArrays.abstract(config, packed=True)
        where: dict[str, Any] = {"mesh": mesh, "tokens": case.tokens, "options": case.options}
        layer = MoE(config, recipe=case.recipe, implementation=case.implementation, arrays=arrays, **where)
        places = NamedSharding(mesh, partition_spec(("tokens", None), layer.layout.rules))
        count = TOKENS * layer.layout.token_shards
        x = jax.ShapeDtypeStruct((count, config.hidden_size), jnp.bfloat16, sharding=places)
        with jax.set_mesh(mesh):
            lowered = jax.jit(MoE.__call__, out_shardings=places).trace(layer, x).lower(lowering_platforms=("cuda",))
            program = lowered.compile(compiler_options=LATENCY_HIDING if case.hides_latency else None)
    return program, layer.layout


def sent(found: Collective, ranks: int) -> float:
    """Bytes that a rank sends, from what it puts in and gets."""
    puts_in, gets = (sum(array.bytes for array in arrays) for arrays in (found.inputs, found.outputs))
    if found.op == "all-gather":
        return puts_in * (ranks - 1)
    if found.op == "reduce-scatter":
        return puts_in - gets
    return (2 if found.op == "all-reduce" else 1) * puts_in * (ranks - 1) / ranks


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_collectives_are_those_of_the_document(
    case: Case, mesh_of: Any, choose_for: Callable[[Mesh], None]
) -> None:
    if case.implementation == "mosaic":
        choose_for(mesh_of(case.gpu))
    executable, layout = compiled(case, mesh_of(case.gpu))
    require_stated_memory(executable, case, layout)
    program = Program(executable.as_text())
    # Two grouped and four dense products; picks and schedule; gather and combine; the norm.
    kernels = 11 if case.implementation == "mosaic" else 0
    assert program.custom_calls["mosaic_gpu_v2"] == kernels, program.custom_calls
    expected = layer_collectives(CONFIG, layout, TOKENS)
    found = program.collectives()
    assert Counter((each.op, str(array)) for each in found for array in each.inputs) == Counter(
        (each.op, f"{each.dtype}[{','.join(map(str, each.shape))}]") for each in expected
    )
    for op in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
        assert sum(sent(each, 8) for each in found if each.op == op) == sum(
            each.sent for each in expected if each.op == op
        )
    if case.tokens == "sharded":
        require_nothing_to_wait(program, found)


def require_stated_memory(executable: Any, case: Case, layout: Layout, config: K3Config = CONFIG) -> None:
    """XLA reuses buffers: the experts' input and output, the larger part, are not both live beside what is between."""
    stated = dispatch_memory(
        config,
        MeshSizes(expert=8),
        TOKENS * layout.token_shards,
        recipe=case.recipe,
        tokens=case.tokens,
        options=case.options,
    ).total
    taken = executable.memory_analysis().temp_size_in_bytes
    print(case, taken, stated)
    assert 0.55 * stated < taken < 1.05 * stated  # the rest of the layer needs little


@pytest.mark.parametrize("options", [PER_RANK, ALL_GATHER], ids=lambda options: options.transport)
def test_what_travels_is_in_the_stated_memory(options: LoadOptions, mesh_of: Any) -> None:
    """Where tokens have few picks, and these are narrow, buffers of rows on their way are half of all."""
    config = dataclasses.replace(CONFIG, num_experts_per_token=2, moe_intermediate_size=64, hidden_size=1024)
    case = Case("hopper", "sharded", options=options)
    executable, layout = compiled(case, mesh_of(case.gpu), config)
    require_stated_memory(executable, case, layout, config)


def require_nothing_to_wait(program: Program, found: list[Collective]) -> None:
    """Shared experts and the exchange of rows don't need each other, and run at the same time.

    Where the shared experts are split, the up-projection runs under the reduce-scatter of theirs.
    """
    (up,), (gate_up,), (down,) = (
        program.readers(program.parameter(path))
        for path in ("latent_up.value", "shared.gate_up.value", "shared.down.value")
    )
    of_shared = [each for each in found if each.inputs[0].shape[-1] == CONFIG.hidden_size]
    of_rows = [each for each in found if each not in of_shared]
    for each in of_rows:
        assert not {gate_up, down} & program.needs(each.start), each
    assert not {each.start for each in of_rows} & program.needs(down)
    assert not {down, *(each.start for each in of_shared)} & program.needs(up)
    overlapped = {name for each in found for name in each.meanwhile}
    assert {gate_up, down} & overlapped, "neither product of the shared experts runs under a collective"
    for each in of_shared:
        assert each.op != "reduce-scatter" or up in each.meanwhile
