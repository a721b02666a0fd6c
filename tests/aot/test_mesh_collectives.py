"""The MoE layer compiled for eight GPUs that are not there: which collectives, how many bytes, what waits for what."""

import dataclasses
from collections import Counter
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
from k3jax.moe_arrays import MoEArrays
from k3jax.options import DEFAULTS, LoadOptions
from sharding import Layout, make_mesh, partition_spec

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


def compiled(case: Case, mesh: Mesh) -> tuple[Program, Layout]:
    """The layer at the release's sizes, as the GPUs of `mesh` would run it."""
    with unchecked_annotations():
        arrays = MoEArrays.abstract(CONFIG, packed=True)
        where: dict[str, Any] = {"mesh": mesh, "tokens": case.tokens, "options": case.options}
        layer = MoE(CONFIG, recipe=case.recipe, implementation=case.implementation, arrays=arrays, **where)
        places = NamedSharding(mesh, partition_spec(("tokens", None), layer.layout.rules))
        count = TOKENS * layer.layout.token_shards
        x = jax.ShapeDtypeStruct((count, CONFIG.hidden_size), jnp.bfloat16, sharding=places)
        with jax.set_mesh(mesh):
            lowered = jax.jit(MoE.__call__, out_shardings=places).trace(layer, x).lower(lowering_platforms=("cuda",))
            program = lowered.compile(compiler_options=LATENCY_HIDING if case.hides_latency else None)
    return Program(program.as_text()), layer.layout


def sent(found: Collective, ranks: int) -> float:
    """Bytes that a rank sends, from what it puts in and gets."""
    puts_in, gets = (sum(array.bytes for array in arrays) for arrays in (found.inputs, found.outputs))
    if found.op == "all-gather":
        return puts_in * (ranks - 1)
    if found.op == "reduce-scatter":
        return puts_in - gets
    return (2 if found.op == "all-reduce" else 1) * puts_in * (ranks - 1) / ranks


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_collectives_are_those_of_the_document(case: Case, mesh_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.implementation == "mosaic":  # which asks what it is to run on
        monkeypatch.setattr(jax, "devices", lambda: list(mesh_of(case.gpu).devices.flat))
    program, layout = compiled(case, mesh_of(case.gpu))
    assert program.custom_calls["mosaic_gpu_v2"] == (2 if case.implementation == "mosaic" else 0), program.custom_calls
    expected = layer_collectives(CONFIG, layout, TOKENS)
    found = program.collectives()
    assert Counter((each.op, str(array)) for each in found for array in each.inputs) == Counter(
        (each.op, f"{each.dtype}[{','.join(map(str, each.shape))}]") for each in expected
    )
    for op in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
        assert sum(sent(each, 8) for each in found if each.op == op) == sum(
            each.sent for each in expected if each.op == op
        )
    if case.tokens == "sharded" and not case.options.split_shared:  # XLA joins the latter's two reduce-scatters
        require_nothing_to_wait(program, found)


def require_nothing_to_wait(program: Program, found: list[Collective]) -> None:
    """Shared experts and the exchange of rows don't need each other, and run at the same time."""
    (up,), (gate_up,), (down,) = (
        program.readers(program.parameter(path))
        for path in ("latent_up.value", "shared.gate_up.value", "shared.down.value")
    )
    for each in found:
        assert not {gate_up, down} & program.needs(each.start), each
    assert not {each.start for each in found} & program.needs(down)
    assert down not in program.needs(up)
    overlapped = {name for each in found for name in each.meanwhile}
    assert {gate_up, down} & overlapped, "neither product of the shared experts runs under a collective"
