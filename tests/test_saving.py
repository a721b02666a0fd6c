"""Layers to checkpoint folders and back: every byte, the config, bounded shards, nothing left behind by a failure."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layers import random_layer, small_config
from numerics import assert_same_bits

from k3jax import GatedMLP, MoE, load_layer, save_layer, save_layers
from k3jax.checkpoint import Checkpoint
from k3jax.checkpoint.synthetic import default_checkpoint, synthetic_config, write_checkpoint
from k3jax.compare import run
from k3jax.experts import gate_and_up_rows
from k3jax.inspection.summary import inspect_checkpoint
from pallas_kernels import MXFP4Array, SwiGLU, to_kernel_layout
from sharding import MeshSizes

pytestmark = pytest.mark.usefixtures("quickly_compiled")
SMALL = small_config(moe_intermediate_size=128)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one dense and two MoE layers, some kilobytes."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "latent_size": 32, "expert_width": 32}
    config = synthetic_config(**sizes, num_experts=4, top_k=2, layers=3)
    return write_checkpoint(tmp_path_factory.mktemp("source") / "model", config)


def tensors(folder: Path) -> dict[str, np.ndarray]:
    checkpoint = Checkpoint.open(folder)
    return {name: np.asarray(checkpoint.shard(file)[name]) for name, file in checkpoint.names.items()}


def assert_equal_tensors(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert_same_bits(actual[name], array)


def test_a_saved_model_is_its_source_to_the_byte(source: Path, tmp_path: Path) -> None:
    """Layers given and tensors copied; through a generator, in files of a bounded size."""
    layers = ((index, load_layer(source, index)) for index in (0, 2))
    folder = save_layers(layers, tmp_path / "saved", source=source, rest=True, max_shard_bytes=15_000)
    assert_equal_tensors(tensors(folder), tensors(source))
    assert json.loads((folder / "config.json").read_bytes()) == json.loads((source / "config.json").read_bytes())
    index = json.loads((folder / "model.safetensors.index.json").read_bytes())
    assert index["metadata"] == json.loads((source / "model.safetensors.index.json").read_bytes())["metadata"]
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 5
    assert {path.name for path in shards} == set(index["weight_map"].values())
    for path in shards:
        assert (
            sum(array.nbytes for name, array in tensors(folder).items() if index["weight_map"][name] == path.name)
            <= 15_000
        )
    problems = inspect_checkpoint(folder, MeshSizes(), lambda *_: None).problems
    assert problems.ok, problems


def test_a_saved_layer_is_read_by_compare_as_equal(tmp_path: Path) -> None:
    folder = save_layer(load_layer(default_checkpoint(), 1), tmp_path / "one", index=1, source=default_checkpoint())
    results = []
    for checkpoint in (default_checkpoint(), folder):
        request = run.Request(checkpoint=checkpoint, layers="1", recipes=("w4a16",), tokens=4)
        found = run.run(run.plan(request), lambda *_: None)
        assert found.ok
        [layer] = found.results
        results.append(repr(layer.stages))  # NaN, where a check has no value, is not equal to itself
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("w4a16", {}),
        ("bf16", {"activation": SwiGLU(), "renormalize": False, "router_activation": "softmax"}),
        ("bf16", {"routed_expert_hidden_size": None, "latent_moe_use_norm": False, "num_shared_experts": 0}),
    ],
)
def test_a_layer_without_a_checkpoint_gets_a_config_of_its_own(
    recipe: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = small_config(**changes)
    layer = random_layer(config, recipe)
    folder = save_layer(layer, tmp_path / "made", index=1, source=config)
    again = load_layer(folder, 1, recipe=recipe)
    assert isinstance(again, MoE)
    saved = Checkpoint.open(folder).config
    assert saved.quantization == ("mxfp4" if recipe == "w4a16" else None)
    assert vars(again.config) | {"quantization": None} == vars(config)
    for ours, theirs in zip(jax.tree.leaves(layer), jax.tree.leaves(again), strict=True):
        assert_same_bits(theirs, ours)


def test_experts_in_a_kernel_s_layout_are_saved_as_they_were_read(tmp_path: Path) -> None:
    layer = random_layer(SMALL, "w4a16")
    expected = tensors(save_layer(layer, tmp_path / "plain", index=1, source=SMALL))
    for experts, gated in ((layer.w13, True), (layer.w2, False)):
        w = gate_and_up_rows(experts.get_value()) if gated else experts.get_value()
        assert isinstance(w, MXFP4Array)
        experts.set_value(to_kernel_layout(w, recipe="w4a16", gated=gated))
    assert_equal_tensors(tensors(save_layer(layer, tmp_path / "laid-out", index=1, source=SMALL)), expected)


def test_layers_with_fewer_experts_change_the_config_s_number(source: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(Checkpoint.open(source).config, num_experts=3)
    layer = MoE(config, rngs=nnx.Rngs(0))
    folder = save_layer(layer, tmp_path / "fewer", index=2, source=source)
    written = json.loads((folder / "config.json").read_bytes())
    expected = json.loads((source / "config.json").read_bytes())
    expected["text_config"]["num_experts"] = 3
    assert written == expected
    again = load_layer(folder, 2)
    assert isinstance(again, MoE)
    assert again.config == config
    with pytest.raises(ValueError, match="layer 1 still has 4 experts, the layers to save 3"):
        save_layers([(2, layer)], tmp_path / "whole", source=source, rest=True)
    assert [path.name for path in tmp_path.iterdir()] == ["fewer"]


def failing(source: Path) -> Iterator[tuple[int, Any]]:
    yield 1, load_layer(source, 1)
    raise RuntimeError("out of layers")


def test_a_failure_leaves_nothing_behind(source: Path, tmp_path: Path) -> None:
    layer, dense = load_layer(source, 1), load_layer(source, 0)
    wider = GatedMLP.random(64, 64, activation=SwiGLU(), rngs=nnx.Rngs(0))
    other = random_layer(small_config(), "w4a16")
    plain = load_layer(source, 2, recipe="bf16")
    requests: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (failing(source), {}, RuntimeError, "out of layers"),
        ([], {}, ValueError, "there is no layer to save"),
        ([(1, layer), (1, layer)], {}, ValueError, "layer 1 is to be saved twice"),
        ([(0, layer)], {}, ValueError, "layer 0 of source is no MoE"),
        ([(0, wider)], {}, ValueError, r"down \(64, 64\) with SwiGLU.* is not source's \(64, 96\) with Situ"),
        ([(1, other)], {}, ValueError, "not of the model that source describes: hidden_size=128, not 64"),
        ([(1, layer), (2, plain)], {}, ValueError, "layer 2 has plain experts and another packed ones"),
        ([(0, dense)], {"max_shard_bytes": 1000}, ValueError, "max_shard_bytes=1000 is too small: tensor .*gate_proj"),
        ([(0, dense)], {"source": SMALL, "rest": True}, ValueError, "pass its folder as source"),
    ]
    for layers, options, kind, message in requests:
        with pytest.raises(kind, match=message):
            save_layers(layers, tmp_path / "out", **{"source": source, **options})
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="out exists; choose a new folder"):
        save_layer(layer, tmp_path / "out", index=1, source=source)


def test_a_changed_byte_would_be_seen(source: Path, tmp_path: Path) -> None:
    layer = load_layer(source, 1)
    assert isinstance(layer, MoE)
    layer.router.bias[...] = layer.router.bias[...].at[0].add(jnp.float32(1e-6))
    saved = Checkpoint.open(save_layer(layer, tmp_path / "saved", index=1, source=source)).read_layer(1)
    expected = Checkpoint.open(source).read_layer(1)
    differing = [name for name in expected if np.any(saved[name] != expected[name])]
    assert differing == ["block_sparse_moe.gate.e_score_correction_bias"]
