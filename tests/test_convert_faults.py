"""What may happen to a conversion: a kill at any moment, a full disk, no permission, another one, a bad source.

The target never holds half a layer, and the next run completes it to the same bytes.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoint_edits import tiny_checkpoint

from k3jax.checkpoint.safetensors_file import SafetensorsFile
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
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == kills, done.stderr
    for kill in found:
        assert kill["whole_ones_read_back"], kill
        assert kill["resumed"], kill
        assert kill["same_records"], kill
        assert kill["reads_back"], kill
        assert kill["left_over"] == [], kill
    return found


def test_a_few_kills(source: Path, tmp_path: Path) -> None:
    survive_kills(source, tmp_path, 4)


@pytest.mark.slow
def test_two_hundred_kills(source: Path, tmp_path: Path) -> None:
    found = survive_kills(source, tmp_path, 200)
    stages = {len(kill["whole"]) for kill in found}
    print(f"whole layers at the moment of the kill: {sorted(stages)}")
    assert {0, 1, 2, 3, 4} == stages


def in_a_process(source: Path, folder: Path, *, first: str = "", under: tuple[str, ...] = ()) -> Any:
    """`k3jax convert SOURCE FOLDER`, after the statements `first`, by the command `under`."""
    program = f"import sys\n{first}\nfrom k3jax.cli import main\nsys.argv = ['k3jax', 'convert', *sys.argv[1:]]\nmain()"
    command = [*under, sys.executable, "-c", program, str(source), str(folder)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)


def test_a_full_disk(source: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for it: writing fails in the middle of a layer."""
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
    failed = in_a_process(source, tmp_path / "out", first=limit)
    assert failed.returncode == 2, failed.stderr
    assert "could not be written" in failed.stderr
    assert any(line.startswith("error: ") for line in failed.stderr.splitlines())  # orbax may log around it
    assert converted_layers(tmp_path / "out") == []
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".layer")] == []
    run.convert(run.Request(source=source, target=tmp_path / "out"))
    assert run.verify(tmp_path / "out") == []


ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


@pytest.mark.skipif(ROOT and not shutil.which("setpriv"), reason="nothing is forbidden to root")
def test_no_permission(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o555)
    under = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search") if ROOT else ()
    failed = in_a_process(source, tmp_path / "out", under=under)
    assert failed.returncode == 2, failed.stderr
    assert "Permission denied" in failed.stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_two_converters(source: Path, tmp_path: Path) -> None:
    with target.locked(tmp_path / "out"), pytest.raises(ValueError, match="another k3jax convert is writing"):
        run.convert(run.Request(source=source, target=tmp_path / "out"))
    run.convert(run.Request(source=source, target=tmp_path / "out"))
    assert run.verify(tmp_path / "out") == []


def test_a_source_that_cannot_be_read_in_the_middle(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    assert run.convert(request).kept == tuple(whole)
    assert run.verify(tmp_path / "out") == []
