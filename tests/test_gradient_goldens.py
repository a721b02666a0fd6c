"""Gradients of a dense and an MoE layer against PyTorch's, from the committed golden file.

In bfloat16 the layers themselves; in float32, where a layer does not work, the plain formula that they are held to.
"""

import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numerics import relative_l2

from k3jax import GatedMLP, MoE, load_layer
from k3jax.checkpoint.safetensors_file import SafetensorsFile
from k3jax.checkpoint.synthetic import write_checkpoint
from k3jax.healing.reference import mlp_output, moe_output

SCRIPT = Path(__file__).parents[1] / "scripts" / "remake_goldens.py"
BF16, FLOAT32 = 1e-2, 1e-5

Gradients = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> tuple[GatedMLP, MoE]:
    """Layers 0 and 1 of the checkpoint that the gradients are of, experts in bfloat16."""
    folder = tmp_path_factory.mktemp("goldens") / "tiny"
    write_checkpoint(folder, runpy.run_path(str(SCRIPT))["TINY"])
    dense, moe = (load_layer(folder, layer, recipe="bf16") for layer in (0, 1))
    assert isinstance(dense, GatedMLP)
    assert isinstance(moe, MoE)
    return dense, moe


@pytest.fixture(scope="module")
def golden() -> SafetensorsFile:
    return SafetensorsFile(runpy.run_path(str(SCRIPT))["GRADIENTS"])


def of_layer(golden: SafetensorsFile, layer: int, dtype: str) -> Gradients:
    """PyTorch's gradients by its names, `x` among them."""
    prefix = f"{layer}.{dtype}."
    return {name.removeprefix(prefix): golden[name] for name in golden if name.startswith(prefix)}


def named_like_pytorch(gate_up: Any, down: Any, prefix: str = "") -> Gradients:
    gate, up = np.asarray(gate_up)
    return {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up, f"{prefix}down_proj.weight": down}


def assert_agree(ours: Gradients, theirs: Gradients, limit: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert float(np.linalg.norm(expected.astype(np.float64))) > 1, name
        assert relative_l2(ours[name], expected) < limit, name


@nnx.jit
def gradients_of(layer: GatedMLP | MoE, x: jax.Array, out: jax.Array) -> Any:
    def objective(layer: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(layer(x).astype(jnp.float32) * out)

    return nnx.grad(objective, argnums=(0, 1))(layer, x)


def operands(golden: SafetensorsFile, layer: int) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(golden[f"{layer}.x"]), jnp.asarray(golden[f"{layer}.out"]).astype(jnp.float32)


def test_a_dense_layer_agrees_with_pytorch(layers: tuple[GatedMLP, MoE], golden: SafetensorsFile) -> None:
    layer, (x, out) = layers[0], operands(golden, 0)
    state, dx = gradients_of(layer, x, out)
    ours = named_like_pytorch(state["gate_up"][...], state["down"][...]) | {"x": dx}
    assert_agree(ours, of_layer(golden, 0, "bfloat16"), BF16)

    def formula(gate_up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(mlp_output(gate_up, down, x, layer.activation) * out)

    wide = [value.astype(jnp.float32) for value in (layer.gate_up[...], layer.down[...], x)]
    gate_up, down, dx = jax.jit(jax.grad(formula, argnums=(0, 1, 2)))(*wide)
    assert_agree(named_like_pytorch(gate_up, down) | {"x": dx}, of_layer(golden, 0, "float32"), FLOAT32)


def test_an_moe_layer_agrees_with_pytorch(layers: tuple[GatedMLP, MoE], golden: SafetensorsFile) -> None:
    layer, (x, out) = layers[1], operands(golden, 1)
    state, dx = gradients_of(layer, x, out)
    shared = named_like_pytorch(state["shared"]["gate_up"][...], state["shared"]["down"][...], "shared_experts.")
    ours = shared | {
        "x": dx,
        "gate.weight": state["router"]["weight"][...],
        "routed_expert_down_proj.weight": state["latent_down"][...],
        "routed_expert_norm.weight": state["latent_norm"][...],
        "routed_expert_up_proj.weight": state["latent_up"][...],
    }
    assert_agree(ours, of_layer(golden, 1, "bfloat16"), BF16)

    assert layer.shared is not None
    variables = {
        "router_weight": layer.router.weight,
        "latent_down": layer.latent_down,
        "latent_norm": layer.latent_norm,
        "latent_up": layer.latent_up,
        "shared_gate_up": layer.shared.gate_up,
        "shared_down": layer.shared.down,
        "w13": layer.w13,
        "w2": layer.w2,
    }
    weights = {name: jnp.asarray(variable[...], jnp.float32) for name, variable in variables.items() if variable}
    ids = layer.route(x).ids
    formula = jax.jit(jax.grad(lambda w, x: jnp.sum(moe_output(w, x, layer.config, ids) * out), argnums=(0, 1)))
    found, dx = formula(weights, x.astype(jnp.float32))
    ours = named_like_pytorch(found["shared_gate_up"], found["shared_down"], "shared_experts.") | {
        "x": dx,
        "gate.weight": found["router_weight"],
        "routed_expert_down_proj.weight": found["latent_down"],
        "routed_expert_norm.weight": found["latent_norm"],
        "routed_expert_up_proj.weight": found["latent_up"],
    }
    assert_agree(ours, of_layer(golden, 1, "float32"), FLOAT32)
