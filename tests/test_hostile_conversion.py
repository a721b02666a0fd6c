"""What `k3jax convert` wrote, damaged: an error in words or a layer, never a crash, a hang or memory without bound."""

import gc
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_edits import edit_json, tiny_checkpoint
from spoiled_files import fuzz, in_words, no_hang

from k3jax import load_layer, load_layers
from k3jax.convert import run
from k3jax.convert.target import LAYER, TARGET

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "latent_size": 64,
    "expert_width": 64,
    "num_experts": 2,
}

# Orbax drops coroutines that fail beside one whose failure it raises, and they may be found in a later test.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _dropped_coroutines() -> Iterator[None]:
    """Finds them here, and not in a test of another file."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense layer and an MoE layer in a kernel's layout; the checkpoint they were made from is gone."""
    folder = tmp_path_factory.mktemp("hostile")
    source = tiny_checkpoint(folder, **SIZES)
    run.convert(run.Request(source=source, target=folder / "out", implementation="mosaic"))
    shutil.rmtree(source)
    return folder / "out"


def spoil(converted: Path, files: list[Path], examples: int) -> None:
    """Loads both layers and, where that goes well, verifies them, with one of the files spoiled."""

    def survives() -> None:
        if in_words(lambda: load_layers(converted, (0, 1))):
            in_words(lambda: run.verify(converted))

    fuzz(files, survives, examples)


def records(converted: Path) -> list[Path]:
    return [converted / TARGET, *sorted(converted.glob(f"layer-*/{LAYER}"))]


def of_orbax(converted: Path) -> list[Path]:
    files = [path for path in converted.glob("layer-*/arrays/**/*") if path.is_file()]
    return sorted(files, key=lambda path: (not path.read_bytes().startswith(b"{"), path))


def test_damaged_records(converted: Path) -> None:
    spoil(converted, records(converted), 100)


def test_a_few_damaged_files_of_orbax(converted: Path) -> None:
    spoil(converted, of_orbax(converted), 15)


@pytest.mark.slow
def test_two_thousand_damaged_files(converted: Path) -> None:
    spoil(converted, records(converted), 1000)
    spoil(converted, of_orbax(converted), 1000)


def huge(record: dict[str, Any]) -> None:
    record["config"]["text_config"]["routed_expert_hidden_size"] = 2**40


def endless_array(record: dict[str, Any]) -> None:
    record["arrays"]["w2.words"]["shape"][0] = 2**40


def missing_array(record: dict[str, Any]) -> None:
    del record["arrays"]["w2.exponents"]


CASES: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "another version": (TARGET, lambda r: r.update(layout_version=99), "layout_version 99 is not 1; convert again, to"),
    "no source": (TARGET, lambda r: r.update(source=None), "source is None"),
    "a list for a config": (TARGET, lambda r: r.update(config=[]), r"config is \[\]"),
    "a config too large": (TARGET, huge, r"takes \d+ bytes or more, not \d+; remove that folder"),
    "fp8 said, bf16 there": (TARGET, lambda r: r.update(dense_weights="fp8"), "keeps dense weights in fp8"),
    "another layer's": (LAYER, lambda r: r.update(layer=0), "is of layer 0"),
    "an unknown kind": (LAYER, lambda r: r.update(experts=["x"]), r"experts \['x'\] is not one of"),
    "another kind": (LAYER, lambda r: r.update(experts="mxfp4"), "are not those of this model's layer"),
    "an endless array": (LAYER, endless_array, "array w2.words is .*1099511627776.* the config makes it uint32 "),
    "a missing array": (LAYER, missing_array, "are not those of this model's layer"),
    "a number for arrays": (LAYER, lambda r: r.update(arrays=7), "arrays 7 are not those"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_record_that_lies_is_refused_before_an_array_is_read(
    case: str, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, edit, message = CASES[case]
    shutil.copytree(converted, tmp_path / "out")
    edit_json(tmp_path / "out" / ("" if name == TARGET else "layer-00001") / name, edit)
    monkeypatch.setattr("k3jax.convert.restore.restore", lambda *_: pytest.fail("an array was read"))
    with no_hang(), pytest.raises(ValueError, match=message):
        load_layer(tmp_path / "out", 1)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "link"])
def test_only_files_are_read(make: Callable[[Path], Any], converted: Path, tmp_path: Path) -> None:
    shutil.copytree(converted, tmp_path / "out")
    manifest = tmp_path / "out" / "layer-00001" / "arrays" / "manifest.ocdbt"
    manifest.unlink()
    make(manifest)
    with no_hang(), pytest.raises(ValueError, match=r"manifest\.ocdbt is neither a file nor a folder"):
        load_layer(tmp_path / "out", 1)


def test_a_damaged_record_is_written_again(tmp_path: Path) -> None:
    source, target = tiny_checkpoint(tmp_path, **SIZES), tmp_path / "out"
    request = run.Request(source=source, target=target, layers=(0,))
    run.convert(request)
    record = target / "layer-00000" / LAYER
    sound = record.read_bytes()
    for damaged in (b"", b"{}", json.dumps(json.loads(sound) | {"shards": 3}).encode()):
        record.write_bytes(damaged)
        assert run.convert(request) == run.Result(written=(0,), kept=(), renewed=(0,))
        assert record.read_bytes() == sound
