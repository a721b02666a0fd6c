"""Cached folders: made once, made again when damaged, and the same for processes that race."""

import errno
import sys
import threading
from pathlib import Path

import pytest
from checkpoint_edits import tiny_config

from k3jax.checkpoint import CONFIG, Checkpoint, cache, synthetic
from k3jax.checkpoint.synthetic import default_checkpoint


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("K3JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(synthetic, "synthetic_config", tiny_config)  # The same road, and quicker.
    return tmp_path / "cache"


def test_the_default_checkpoint_is_made_once(own_cache: Path) -> None:
    folder = default_checkpoint()
    assert folder.parent == own_cache
    made = (folder / CONFIG).stat().st_mtime_ns
    assert default_checkpoint() == folder
    assert (folder / CONFIG).stat().st_mtime_ns == made
    assert len(Checkpoint.open(folder).read_layer(1)) == 8 + 6 * 4
    assert list(own_cache.iterdir()) == [folder]


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "forget", "add", "file"])
def test_a_damaged_default_checkpoint_is_made_again(damage: str, own_cache: Path) -> None:
    folder = default_checkpoint()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    victim = folder / "model-00002-of-000003.safetensors"
    if damage == "truncate":
        victim.write_bytes(before[victim.name][:-1])
    elif damage == "flip":
        victim.write_bytes(before[victim.name][:-1] + bytes([before[victim.name][-1] ^ 1]))
    elif damage == "delete":
        victim.unlink()
    elif damage == "forget":
        (folder / cache.RECORD).unlink()
    elif damage == "add":
        (folder / "stranger").write_text("x")
    else:
        folder.rename(own_cache / "moved")
        folder.write_text("not a folder")
    assert default_checkpoint() == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert {path.name for path in own_cache.iterdir()} <= {folder.name, "moved"}


def test_makers_that_race_agree(own_cache: Path) -> None:
    barrier = threading.Barrier(4)
    made: list[Path] = []

    def make(folder: Path) -> None:
        barrier.wait()  # All have found nothing before anyone is done.
        folder.mkdir()
        (folder / "x").write_text("x")

    def run() -> None:
        made.append(cache.cached_folder("raced", make))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [own_cache / "raced"] * 4
    assert [path.name for path in own_cache.iterdir()] == ["raced"]
    assert sorted(path.name for path in made[0].iterdir()) == [cache.RECORD, "x"]


def test_a_cache_that_cannot_be_written(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_cache.write_text("a file in the way")
    with pytest.raises(FileExistsError, match="set K3JAX_CACHE"):
        default_checkpoint()

    def refuse(folder: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setenv("K3JAX_CACHE", str(own_cache.with_name("other")))
    with pytest.raises(OSError, match=r"Read-only file system.*set K3JAX_CACHE"):
        cache.cached_folder("x", refuse)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("K3JAX_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_root() == tmp_path / "xdg" / "k3jax"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # The standard says to ignore it.
    assert cache.cache_root() == tmp_path / ".cache" / "k3jax"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache.cache_root() == tmp_path / "Library" / "Caches" / "k3jax"
    monkeypatch.setenv("K3JAX_CACHE", str(tmp_path / "mine"))
    assert cache.cache_root() == tmp_path / "mine"
