"""Checkpoint folders with any file damaged, at random: an error in words or a layer, never a crash or a hang."""

import contextlib
import copy
import json
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from annotations import unchecked_annotations
from checkpoint_edits import tiny_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3jax.checkpoint import CONFIG, INDEX, Checkpoint
from k3jax.inspection import inspect_checkpoint
from sharding.mesh import MeshSizes

SECONDS = 10  # Anything that takes longer on a folder of 100 kB hangs.
HUGE = 2**63
WORDS: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, 0, -1, 3, 2**31, HUGE, 10**40, 1e308, 0.5, "", "../x", "/etc/passwd", "é" * 9, []]
)
JUNK = WORDS | st.recursive(
    WORDS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner), max_leaves=4
)
EDIT = st.tuples(st.sampled_from(["replace", "delete", "rename", "copy"]), st.integers(0, 2**32), JUNK)
BYTES = st.tuples(st.integers(0, 2**32), st.sampled_from(["flip", "cut", "insert"]), st.binary(min_size=1, max_size=9))


class Hang(BaseException):
    """An example took longer than `SECONDS`."""


@contextlib.contextmanager
def no_hang() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from nodes(value[key])


def edited(value: Any, edits: list[tuple[str, int, Any]]) -> Any:
    value = copy.deepcopy(value)
    for kind, at, junk in edits:
        places = list(nodes(value))
        if not places:
            break
        parent, key = places[at % len(places)]
        if kind == "delete":
            del parent[key]
        elif kind == "rename" and isinstance(parent, dict):
            parent[str(junk)] = parent.pop(key)
        elif kind == "copy":
            other, there = places[(at // 7) % len(places)]
            parent[key] = copy.deepcopy(other[there])
        else:
            parent[key] = junk
    return value


def damaged(content: bytes, damages: list[tuple[int, str, bytes]]) -> bytes:
    for at, kind, by in damages:
        at %= len(content) + 1
        if kind == "cut":
            content = content[:at]
        elif kind == "insert":
            content = content[:at] + by + content[at:]
        else:
            content = content[:at] + by + content[at + len(by) :]
    return content


def spoiled(content: bytes, edits: list[Any], damages: list[Any]) -> bytes:
    """A JSON file or a safetensors file with its JSON edited and its bytes damaged."""
    if content.startswith(b"{"):
        return damaged(json.dumps(edited(json.loads(content), edits)).encode(), damages)
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(edited(json.loads(content[8:end]), edits)).encode()
    return damaged(len(header).to_bytes(8, "little") + header + content[end:], damages)


def survives(folder: Path) -> None:
    """Inspects the folder and reads all of both layers; anything but an answer or an error in words propagates."""
    for look in (
        lambda: inspect_checkpoint(folder, MeshSizes(expert=2)),
        lambda: list(Checkpoint.open(folder).read_layer(0).values()),
        lambda: list(Checkpoint.open(folder).read_layer(1).values()),
    ):
        try:
            with no_hang(), unchecked_annotations():
                look()
        except (ValueError, NotImplementedError, FileNotFoundError) as error:
            said = str(error)
            assert 0 < len(said) < 5000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("hostile"), hidden_size=32, intermediate_size=32, latent_size=32)


def fuzz(checkpoint: Path, examples: int) -> None:
    """`examples` folders, each with one file of the sound one spoiled."""
    files = {path.name: path.read_bytes() for path in sorted(checkpoint.iterdir())}
    names = sorted(files, key=lambda name: (name not in (CONFIG, INDEX), name))

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), database=None)
    @given(st.sampled_from(names), st.lists(EDIT, max_size=3), st.lists(BYTES, max_size=2))
    def one(name: str, edits: list[Any], damages: list[Any]) -> None:
        (checkpoint / name).write_bytes(spoiled(files[name], edits, damages))
        survives(checkpoint)

    try:
        one()
    finally:
        for name, content in files.items():
            (checkpoint / name).write_bytes(content)


def test_a_few_hundred_damaged_folders(checkpoint: Path) -> None:
    fuzz(checkpoint, 250)


@pytest.mark.slow
def test_ten_thousand_damaged_folders(checkpoint: Path) -> None:
    fuzz(checkpoint, 10_000)


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
