"""What may happen to a conversion: a kill at any moment, a full disk, no permission, another one, a bad source.

The target never holds half a layer, and the next run completes it to the same bytes.
"""

import contextlib
import ctypes
import errno
import gc
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_edits import tiny_checkpoint
from typer.testing import CliRunner

from k3jax.checkpoint.safetensors_file import SafetensorsFile
from k3jax.cli import app
from k3jax.convert import run, target
from k3jax.convert.target import converted_layers

PROGRAM = Path(__file__).with_name("interrupted_convert.py")
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[1])}
SEED = 20261130


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("faults"), layers=4)


def survive_kills(source: Path, folder: Path, kills: int) -> list[dict[str, Any]]:
    command = [sys.executable, str(PROGRAM), str(source), str(folder), str(kills), str(SEED)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 1 + kills, done.stderr
    of_steps, *found = lines
    layers_are_whole_at_every_step(*of_steps)
    for kill in found:
        assert kill["status"] == 0, (kill, done.stderr)
        assert kill["same_records"], kill
        assert kill["left_over"] == [], kill
    return found


def layers_are_whole_at_every_step(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    """Whenever a process might be killed there is no layer, all of the old one or all of the new one."""
    before, after = first[-1], second[-1]
    assert len(before) == len(after) == 4
    for step in first:
        assert step.items() <= before.items()
    for step in second:
        assert all(files in (before[name], after[name]) for name, files in step.items())
    assert {len(step) for step in first} == {0, 1, 2, 3, 4}
    assert all(before[name] != after[name] for name in after)  # orbax has names of its own each time


def test_a_few_kills(source: Path, tmp_path: Path) -> None:
    survive_kills(source, tmp_path, 4)


@pytest.mark.slow
def test_two_hundred_kills(source: Path, tmp_path: Path) -> None:
    found = survive_kills(source, tmp_path, 200)
    stages = {len(kill["whole"]) for kill in found}
    print(f"whole layers at the moment of the kill: {sorted(stages)}")
    assert {0, 1, 2, 3, 4} == stages


def records(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("k3jax-*.json")}


@pytest.fixture(scope="module")
def undisturbed(source: Path) -> dict[str, bytes]:
    """The records, with the digests of all arrays, of a conversion to which nothing happened."""
    run.convert(run.Request(source=source, target=source.parent / "undisturbed"))
    return records(source.parent / "undisturbed")


def completes(source: Path, folder: Path, undisturbed: dict[str, bytes]) -> run.Result:
    """What the next conversion does, which must end in the same arrays and records, and leave nothing over."""
    result = run.convert(run.Request(source=source, target=folder))
    assert run.verify(folder) == []
    assert records(folder) == undisturbed
    assert [path.name for path in folder.iterdir() if path.name.startswith(".layer")] == []
    return result


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A limit on the size of files stands for a full disk: writing fails in the middle of a layer."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk(source: Path, tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    with files_of_at_most(20_000):
        failed = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "out")])
    assert failed.exit_code == 2, failed.output
    assert "could not be written" in failed.stderr
    assert any(line.startswith("error: ") for line in failed.stderr.splitlines())  # orbax may log around it
    del failed
    gc.collect()  # orbax drops coroutines that fail beside the one whose failure it raises: that is told now
    assert converted_layers(tmp_path / "out") == []
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".layer")] == []
    assert completes(source, tmp_path / "out", undisturbed).written == (0, 1, 2, 3)


def fail(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("step", ["k3jax.outputs.os.replace", "k3jax.convert.target.os.fsync", "pathlib.Path.rename"])
def test_a_disk_that_is_full_when_a_layer_is_published(
    step: str, source: Path, tmp_path: Path, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(source.parent / "undisturbed", tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "layer-00001")
    with monkeypatch.context() as patch:
        patch.setattr(step, fail)
        with pytest.raises(OSError, match="No space left"):
            run.convert(run.Request(source=source, target=tmp_path / "out"))
    assert converted_layers(tmp_path / "out") == [0, 2, 3]
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".layer")] == []
    result = completes(source, tmp_path / "out", undisturbed)
    assert result == run.Result(written=(1,), kept=(0, 2, 3), renewed=())


@contextlib.contextmanager
def like_anyone() -> Iterator[None]:
    """Takes from this thread root's right to write where nobody may (CAP_DAC_OVERRIDE, Linux's capability 1)."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, rights = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # effective is at 0 and 3
    if libc.capget(header, rights):
        pytest.skip("nothing is forbidden to root")
    before = rights[0]
    rights[0] = before & ~(1 << 1)
    assert libc.capset(header, rights) == 0
    try:
        yield
    finally:
        rights[0] = before
        assert libc.capset(header, rights) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="takes root's rights as Linux has them")
def test_no_permission(source: Path, tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    (tmp_path / "out").mkdir(mode=0o555)
    with like_anyone():
        failed = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "out")])
    assert failed.exit_code == 2, failed.output
    assert "Permission denied" in failed.stderr
    assert list((tmp_path / "out").iterdir()) == []
    (tmp_path / "out").chmod(0o755)
    completes(source, tmp_path / "out", undisturbed)


def test_two_converters(source: Path, tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    with target.locked(tmp_path / "out"), pytest.raises(ValueError, match="another k3jax convert is writing"):
        run.convert(run.Request(source=source, target=tmp_path / "out"))
    completes(source, tmp_path / "out", undisturbed)


def test_a_source_that_cannot_be_read_in_the_middle(
    source: Path, tmp_path: Path, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = SafetensorsFile.read_into
    reads = 0

    def fail_later(self: SafetensorsFile, begin: int, arrays: Any) -> None:
        nonlocal reads
        reads += 1
        if reads > 12:
            raise OSError(errno.EIO, "Input/output error", str(self.path))
        original(self, begin, arrays)

    request = run.Request(source=source, target=tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsFile, "read_into", fail_later)
        with pytest.raises(OSError, match=r"Input/output error: .*safetensors"):
            run.convert(request)
    whole = converted_layers(tmp_path / "out")
    assert 0 < len(whole) < 4
    assert run.verify(tmp_path / "out") == []
    assert completes(source, tmp_path / "out", undisturbed).kept == tuple(whole)
