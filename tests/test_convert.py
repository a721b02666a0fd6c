"""`k3jax convert`: what it writes loads as the checkpoint does, on any mesh; stale or damaged layers are told."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import pytest
from checkpoint_edits import PREFIX, edit_config, read_all, rewrite, tiny_checkpoint
from flax import nnx
from numerics import assert_same_bits
from typer.testing import CliRunner, Result

from k3jax import LoadOptions, MoE, load_layer, load_layers
from k3jax.cli import app
from k3jax.convert import run
from k3jax.convert.target import LAYER, TARGET
from pallas_kernels import KernelWeights, MXFP4Array, select
from sharding import make_mesh

pytestmark = pytest.mark.usefixtures("quickly_compiled")
SIZES: dict[str, Any] = {"hidden_size": 128, "latent_size": 128, "expert_width": 128, "num_experts": 4}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("convert"), **SIZES)


@pytest.fixture(scope="module")
def converted(source: Path) -> Path:
    """Both layers in the checkpoint's own layout."""
    target = source.parent / "converted"
    assert run.convert(run.Request(source=source, target=target)).written == (0, 1)
    return target


def k3jax_convert(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def assert_same_layers(found: Any, expected: Any) -> None:
    """The same arrays, and everything else that a layer has."""
    (ours, our_state), (theirs, their_state) = (nnx.split(layer) for layer in (found, expected))
    assert ours == theirs
    jax.tree.map(assert_same_bits, nnx.to_pure_dict(our_state), nnx.to_pure_dict(their_state))


@pytest.mark.parametrize("recipe", ["w4a16", "w4a8"])
def test_a_converted_layer_is_the_checkpoint_s(recipe: str, source: Path, converted: Path) -> None:
    told: list[tuple[int, int, str]] = []
    options = LoadOptions(progress=lambda done, total, what: told.append((done, total, what)))
    restored = load_layers(converted, (0, 1), recipe=recipe, options=options)
    for found, expected in zip(restored, load_layers(source, (0, 1), recipe=recipe), strict=True):
        assert_same_layers(found, expected)
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(layer))) for layer in restored]
    assert [done for done, *_ in told] == [0, sizes[0], sizes[0], sum(sizes)]
    assert {(total, what) for _, total, what in told} == {(sum(sizes), "layer 0"), (sum(sizes), "layer 1")}


@pytest.mark.parametrize("sizes", [(1, 4, 2), (2, 2, 1)])
def test_it_is_split_over_another_mesh(sizes: tuple[int, int, int], source: Path, converted: Path) -> None:
    mesh = make_mesh(*sizes)
    found, expected = load_layer(converted, 1, mesh=mesh), load_layer(source, 1, mesh=mesh)
    assert_same_layers(found, expected)
    for ours, theirs in zip(jax.tree.leaves(nnx.state(found)), jax.tree.leaves(nnx.state(expected)), strict=True):
        assert ours.sharding == theirs.sharding
    assert_same_layers(load_layer(converted, 0, mesh=mesh), load_layer(source, 0, mesh=mesh))


def test_a_kernel_s_layout_is_written_anywhere_and_taken_apart_where_it_cannot_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = run.Request(source=source, target=tmp_path / "out", layers=(1,), implementation="mosaic")
    run.convert(request)
    mesh = make_mesh(expert=2)
    here, spread = load_layer(tmp_path / "out", 1), load_layer(tmp_path / "out", 1, mesh=mesh)
    assert isinstance(here, MoE)
    assert isinstance(here.w13.get_value(), MXFP4Array)
    assert_same_layers(here, load_layer(source, 1))
    assert_same_layers(spread, load_layer(source, 1, mesh=mesh))
    run.convert(dataclasses.replace(request, target=tmp_path / "by two", mesh=mesh))
    one, two = (tmp_path / name / "layer-00001" / LAYER for name in ("out", "by two"))
    assert one.read_bytes() == two.read_bytes()  # the digests of all arrays
    monkeypatch.setattr(select, "why_not_on_gpu", lambda name, _: None if name == "mosaic" else "absent")
    there = load_layer(tmp_path / "out", 1)
    assert isinstance(there, MoE)
    assert isinstance(there.w13.get_value(), KernelWeights)
    assert_same_layers(there, load_layer(source, 1))
    assert_same_layers(load_layer(tmp_path / "out", 1, mesh=mesh), load_layer(source, 1, mesh=mesh))


def test_a_kernel_s_layout_of_parts_of_the_width_is_not_written(source: Path, tmp_path: Path) -> None:
    mesh = make_mesh(expert=2, tensor=2)
    request = run.Request(source=source, target=tmp_path / "out", implementation="mosaic", mesh=mesh)
    with pytest.raises(NotImplementedError, match="convert with tensor=1, and load_layers splits what was written"):
        run.convert(request)
    assert not (tmp_path / "out").exists()
    run.convert(dataclasses.replace(request, implementation=None, layers=(1,)))
    assert_same_layers(load_layer(tmp_path / "out", 1), load_layer(source, 1))


def test_plain_experts_and_recipe_bf16(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path, plain_experts="F32", **SIZES)
    with pytest.raises(ValueError, match="stored plain"):
        run.convert(run.Request(source=source, target=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    run.convert(run.Request(source=source, target=tmp_path / "out", recipe="bf16", layers=(1,)))
    assert_same_layers(load_layer(tmp_path / "out", 1, recipe="bf16"), load_layer(source, 1, recipe="bf16"))
    with pytest.raises(ValueError, match="keeps its experts in bf16, for another recipe than 'w4a16'"):
        load_layer(tmp_path / "out", 1)
    with pytest.raises(FileNotFoundError, match="has no layer 0; converted are 1"):
        load_layer(tmp_path / "out", 0, recipe="bf16")
    request = run.Request(source=source, target=tmp_path / "out", options=LoadOptions(quantize_plain=True))
    with pytest.raises(ValueError, match=r"recipe 'bf16', not 'w4a16'; name another folder"):
        run.convert(request)


def test_only_what_is_missing_or_stale_is_written_again(source: Path, converted: Path, tmp_path: Path) -> None:
    again = tmp_path / "source"
    shutil.copytree(source, again)
    request = run.Request(source=again, target=tmp_path / "out")
    assert run.convert(request).written == (0, 1)
    assert run.convert(request) == run.Result(written=(), kept=(0, 1), renewed=())
    shutil.rmtree(tmp_path / "out" / "layer-00000")
    assert run.convert(request) == run.Result(written=(0,), kept=(1,), renewed=())
    shard = again / "model-00002-of-000003.safetensors"
    with shard.open("r+b") as file:  # another model's weights under the same header
        file.seek(-5, os.SEEK_END)
        file.write(b"\x01\x02\x03\x04\x05")
    with pytest.raises(ValueError, match="has changed since layer 1 was converted"):
        load_layer(tmp_path / "out", 1)
    assert len(run.verify(tmp_path / "out")) == 1
    assert run.convert(request) == run.Result(written=(1,), kept=(0,), renewed=(1,))
    assert_same_layers(load_layer(tmp_path / "out", 1), load_layer(again, 1))
    edit_config(again, {"rms_norm_eps": 1e-3})
    with pytest.raises(ValueError, match="was made from or with"):
        run.convert(request)
    with pytest.raises(ValueError, match="has changed since"):
        load_layer(tmp_path / "out", 1)
    shutil.rmtree(again)  # a checkpoint that is no longer there cannot be compared
    assert load_layer(tmp_path / "out", 1)


def test_a_damaged_array_is_found_and_named(converted: Path, tmp_path: Path) -> None:
    shutil.copytree(converted, tmp_path / "out")
    assert run.verify(tmp_path / "out") == []
    largest = max((tmp_path / "out" / "layer-00001" / "arrays").rglob("d/*"), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    (wrong,) = run.verify(tmp_path / "out")
    assert "layer-00001" in wrong
    record = json.loads((tmp_path / "out" / "layer-00000" / LAYER).read_bytes())
    del record["arrays"]
    (tmp_path / "out" / "layer-00000" / LAYER).write_text(json.dumps(record))
    assert "lacks arrays" in run.verify(tmp_path / "out")[0]


def test_foreign_folders_are_left_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files"):
        run.convert(run.Request(source=source, target=tmp_path))
    with pytest.raises(ValueError, match="is a file"):
        run.convert(run.Request(source=source, target=tmp_path / "notes.txt"))
    with pytest.raises(ValueError, match=r"implementation='triton' is not one of reference, xla, mosaic"):
        run.convert(run.Request(source=source, target=tmp_path / "x", implementation="triton"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]


def test_the_command(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = k3jax_convert(source, out, "--layers", 1, "--mesh", "expert=4", "--verify")
    assert done.exit_code == 0, done.output
    assert "1 layers written, 0 were there" in done.stdout
    assert "Everything reads back" in done.stdout
    assert_same_layers(load_layer(out, 1), load_layer(source, 1))
    (out / TARGET).write_text("{}")
    refused = k3jax_convert(source, out)
    assert refused.exit_code == 2
    assert "convert again" in refused.stderr
    assert k3jax_convert(source, tmp_path / "y", "--layers", 5).exit_code == 2


def test_a_renamed_tensor_is_told_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "source"
    shutil.copytree(source, copy)
    assert f"{PREFIX}gate.weight" in read_all(copy)
    rewrite(copy, lambda tensors: tensors.update({"x": tensors.pop(f"{PREFIX}gate.weight")}))
    with pytest.raises(ValueError, match=r"missing 'block_sparse_moe\.gate\.weight'"):
        run.convert(run.Request(source=copy, target=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
