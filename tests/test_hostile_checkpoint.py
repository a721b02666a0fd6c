"""Checkpoint folders with any file damaged, at random: an error in words or a layer, never a crash or a hang."""

import json
import shutil
import threading
from pathlib import Path

import pytest
from checkpoint_edits import tiny_checkpoint
from spoiled_files import fuzz, in_words, no_hang

from k3jax.checkpoint import CONFIG, INDEX, Checkpoint
from k3jax.inspection import inspect_checkpoint
from sharding.mesh import MeshSizes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("hostile"), hidden_size=32, intermediate_size=32, latent_size=32)


def spoil(checkpoint: Path, examples: int) -> None:
    """Inspects the folder and reads all of both layers, with one file of it spoiled."""

    def survives() -> None:
        in_words(lambda: inspect_checkpoint(checkpoint, MeshSizes(expert=2)))
        in_words(lambda: list(Checkpoint.open(checkpoint).read_layer(0).values()))
        in_words(lambda: list(Checkpoint.open(checkpoint).read_layer(1).values()))

    fuzz(sorted(checkpoint.iterdir(), key=lambda path: (path.name not in (CONFIG, INDEX), path)), survives, examples)


def test_a_hundred_damaged_folders(checkpoint: Path) -> None:
    spoil(checkpoint, 120)


@pytest.mark.slow
def test_ten_thousand_damaged_folders(checkpoint: Path) -> None:
    spoil(checkpoint, 10_000)


def test_a_config_of_endless_layers_is_refused_at_once(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "x")
    config = json.loads((checkpoint / CONFIG).read_bytes())
    config["text_config"]["num_hidden_layers"] = 10**15
    (tmp_path / "x" / CONFIG).write_text(json.dumps(config))
    with no_hang(), pytest.raises(ValueError, match="at most 4000000 are accepted"):
        inspect_checkpoint(tmp_path / "x", MeshSizes())


def test_a_shard_that_shrinks_while_it_is_read(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "x")
    tensors = Checkpoint.open(tmp_path / "x").read_layer(1)
    for path in (tmp_path / "x").glob("*.safetensors"):
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 100)
    with pytest.raises(ValueError, match="was cut short while it was being read"):
        list(tensors.values())
    with pytest.raises(ValueError, match="was changed while it was being read"):
        tensors.require_unchanged()


def test_a_shard_that_is_replaced_while_it_is_read(checkpoint: Path, tmp_path: Path) -> None:
    """By one with the same header, which threads that open it again must not take for it."""
    shutil.copytree(checkpoint, tmp_path / "x")
    tensors = Checkpoint.open(tmp_path / "x").read_layer(1)
    for path in list((tmp_path / "x").glob("*.safetensors")):
        shutil.copy(path, tmp_path / "other")
        (tmp_path / "other").rename(path)
    reads: list[BaseException | None] = []

    def read() -> None:
        try:
            list(tensors.values())
        except ValueError as error:
            reads.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert "was replaced while it was being read" in str(reads[0])
