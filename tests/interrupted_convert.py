"""Converts a checkpoint over and over in processes that are killed at random moments, and says how each resume ended.

A program of its own: `interrupted_convert.py SOURCE FOLDER KILLS SEED`. One process imports everything, and forks for
each attempt. Prints a JSON line for each kill: the second it came at, which layers were whole, and what a resumed
conversion left.
"""

import functools
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


def ended_well(child: int) -> bool:
    return os.waitpid(child, 0)[1] == 0


def records(target: Path) -> dict[str, str]:
    """The digest of every record that k3jax wrote, which hold the arrays' digests."""
    paths = [target / TARGET, *(layer_folder(target, layer) / LAYER for layer in converted_layers(target))]
    return {str(path.relative_to(target)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def reads_back(target: Path) -> bool:
    """Whether every layer that looks whole is; in a process of its own, so that this one can go on forking."""

    def check() -> None:
        assert run.verify(target) == []

    return ended_well(forked(check))


def main(source: Path, folder: Path, kills: int, seed: int) -> None:
    """Kills `kills` conversions."""
    request = run.Request(source=source, target=folder / "reference")
    start = time.perf_counter()
    assert ended_well(forked(lambda: run.convert(request)))
    duration = time.perf_counter() - start
    expected, rng = records(folder / "reference"), random.Random(seed)
    for kill in range(kills):
        target = folder / f"target{kill}"
        moment = rng.uniform(0, 1.1 * duration)
        again = functools.partial(run.convert, run.Request(source=source, target=target))
        child = forked(again)
        time.sleep(moment)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found: dict[str, Any] = {"seconds": moment, "of": duration}
        found["whole"] = converted_layers(target) if target.exists() else []
        found["whole_ones_read_back"] = not found["whole"] or reads_back(target)
        found["resumed"] = ended_well(forked(again))
        found["same_records"] = records(target) == expected
        found["reads_back"] = reads_back(target)
        found["left_over"] = sorted(path.name for path in target.iterdir() if path.name.startswith(".layer"))
        print(json.dumps(found), flush=True)
        shutil.rmtree(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
