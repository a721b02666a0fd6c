"""Converts a checkpoint over and over in processes that are killed at random moments, and says how each resume ended.

A program of its own: `interrupted_convert.py SOURCE FOLDER KILLS SEED`. One process imports everything, and forks for
each attempt. First it prints, as JSON, what stood in the layers' places at every step of a conversion that nothing
disturbs and of one that replaces its layers; then a line for each kill: the second it came at, which layers were whole,
and what a resumed conversion left.
"""

import functools
import gc
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orbax.checkpoint  # noqa: F401

from k3jax.convert import run
from k3jax.convert.target import LAYER, TARGET, converted_layers, layer_folder

A_LAYER = 0.3  # seconds that converting one may take


def forked(action: Callable[[], object]) -> int:
    """The process of `action`, which exits with 0 if it ends."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return child


def status_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def records(target: Path) -> dict[str, str]:
    """The digest of every record that k3jax wrote, which hold the arrays' digests."""
    paths = [target / TARGET, *(layer_folder(target, layer) / LAYER for layer in converted_layers(target))]
    return {str(path.relative_to(target)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def layers(target: Path) -> dict[str, list[str]]:
    """The files, with their sizes, in each layer's place."""
    return {
        folder.name: sorted(f"{path.relative_to(folder)} {path.stat().st_size}" for path in folder.rglob("*"))
        for folder in target.glob("layer-*")
    }


def watched(request: run.Request, found: Path) -> None:
    """Converts twice, of a source that looks changed the second time; writes to `found` what was seen on the way."""
    seen: list[list[dict[str, list[str]]]] = []
    steps = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"}

    def look(event: str, _: Any) -> None:
        if event in steps and seen and (now := layers(request.target)) not in seen[-1]:
            seen[-1].append(now)

    sys.addaudithook(look)  # for the life of this process
    for _ in range(2):
        seen.append([])
        run.convert(request)
        seen[-1].append(layers(request.target))
        if len(seen) == 1:
            for shard in request.source.glob("*.safetensors"):
                os.utime(shard)
    result = json.dumps(seen)
    seen.clear()
    found.write_text(result)


def wait_for_layers(target: Path, count: int) -> None:
    """Until so many are in their places, however busy the machine is; or a minute."""
    deadline = time.perf_counter() + 60
    while len(list(target.glob("layer-*"))) < count and time.perf_counter() < deadline:
        time.sleep(0.001)


def after_a_kill(request: run.Request) -> None:
    """Exits with 2 if a layer that looks whole is not; with 3 if a resumed conversion does not read back."""
    if request.target.exists() and converted_layers(request.target) and run.verify(request.target):
        os._exit(2)
    run.convert(request)
    if run.verify(request.target):
        os._exit(3)


def main(source: Path, folder: Path, kills: int, seed: int) -> None:
    """Kills `kills` conversions."""
    gc.freeze()  # what was imported is not searched again by every child
    request = run.Request(source=source, target=folder / "reference")
    assert status_of(forked(lambda: watched(request, folder / "seen.json"))) == 0
    print((folder / "seen.json").read_text(), flush=True)
    expected, rng = records(request.target), random.Random(seed)
    for kill in range(kills):
        attempt = run.Request(source=source, target=folder / f"target{kill}")
        child, start = forked(functools.partial(run.convert, attempt)), time.perf_counter()
        wait_for_layers(attempt.target, rng.randrange(5))
        time.sleep(rng.uniform(0, A_LAYER))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found: dict[str, Any] = {"seconds": time.perf_counter() - start}
        found["whole"] = converted_layers(attempt.target) if attempt.target.exists() else []
        found["status"] = status_of(forked(functools.partial(after_a_kill, attempt)))
        found["same_records"] = records(attempt.target) == expected
        found["left_over"] = sorted(path.name for path in attempt.target.iterdir() if path.name.startswith(".layer"))
        print(json.dumps(found), flush=True)
        shutil.rmtree(attempt.target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
