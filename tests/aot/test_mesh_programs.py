"""The MoE layer compiled for eight GPUs that are not there: which collectives, how many bytes, what waits for what."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from annotations import unchecked_annotations
from hlo import Array, Program
from jax.sharding import Mesh, NamedSharding

from k3jax import K3Config, MoE
from k3jax.moe_arrays import MoEArrays
from k3jax.options import DEFAULTS, LoadOptions
from sharding import make_mesh, partition_spec

CONFIG = K3Config.from_pretrained(Path(__file__).parents[1] / "data" / "k3-config.json")
TOKENS = 1024


@pytest.fixture(scope="module", params=["hopper", "blackwell"])
def mesh(request: pytest.FixtureRequest, gpus: Any) -> Mesh:
    """Eight ranks of `expert`."""
    return make_mesh(expert=8, devices=gpus(request.param, 8))


def compiled(mesh: Mesh, tokens: str, *, recipe: str = "w4a16", options: LoadOptions = DEFAULTS) -> Program:
    """The layer at the release's sizes, as eight GPUs of `mesh` would run it."""
    with unchecked_annotations():
        arrays = MoEArrays.abstract(CONFIG, packed=True)
        layer = MoE(
            CONFIG, recipe=recipe, implementation="xla", arrays=arrays, mesh=mesh, tokens=tokens, options=options
        )
        places = NamedSharding(mesh, partition_spec(("tokens", None), layer.layout.rules))
        x = jax.ShapeDtypeStruct((TOKENS, CONFIG.hidden_size), jnp.bfloat16, sharding=places)
        with jax.set_mesh(mesh):
            call = jax.jit(lambda layer, x: layer(x), out_shardings=places)
            return Program(call.trace(layer, x).lower(lowering_platforms=("cuda",)).compile().as_text())


def test_replicated_tokens_need_one_all_reduce(mesh: Mesh) -> None:
    program = compiled(mesh, "replicated")
    (found,) = program.collectives()
    assert found.op == "all-reduce"
    assert found.inputs == (Array("f32", (TOKENS, CONFIG.hidden_size + CONFIG.latent_size)),)
