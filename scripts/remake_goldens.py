"""Remake the golden files with PyTorch, in an environment of its own, and compare them with the committed ones.

    uv run python scripts/remake_goldens.py [--update]

Exit status 0: the goldens agree, or PyTorch could not be had (a banner says so). 1: they differ, or capturing failed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from k3jax.checkpoint.cache import cache_root
from k3jax.checkpoint.safetensors_file import SafetensorsFile
from k3jax.checkpoint.synthetic import default_checkpoint, synthetic_config, write_checkpoint
from k3jax.compare.capture import Capture

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "data" / "golden-embedded.safetensors"
GRADIENTS = GOLDEN.with_name("golden-gradients.safetensors")
CAPTURE_SCRIPT = ROOT / "scripts" / "capture_torch.py"
CAPTURE_ARGUMENTS = ("--layers", "0,1", "--tokens", "24", "--seed", "0")
TINY = synthetic_config(  # of the gradients' checkpoint, all of whose weights have one in the golden file
    hidden_size=64, intermediate_size=64, latent_size=32, expert_width=32, num_experts=8, top_k=3, layers=2
)

INSTALL_SECONDS = 420
CAPTURE_SECONDS = 180
CLOSE = 1e-3
"""Relative L2 between captures of two CPUs: float32 sums in another order move a few bfloat16 roundings, 1e-4 or so."""


class NoPyTorchError(Exception):
    """PyTorch can't be had here: no fault of the goldens."""


def script_dependencies() -> list[str]:
    """What the capture script's inline metadata ask for, so that the pin is written once."""
    block = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", CAPTURE_SCRIPT.read_text(), re.MULTILINE)
    assert block is not None, "the capture script has inline metadata"
    dependencies: list[str] = tomllib.loads(re.sub(r"^# ?", "", block[1], flags=re.MULTILINE))["dependencies"]
    return dependencies


def is_python_311(python: Path | str) -> bool:
    query = [str(python), "-c", "import sys, venv, ensurepip; print(*sys.version_info[:2])"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0 and answer.stdout.split() == ["3", "11"]


def find_python_311() -> str:
    """A Python 3.11 that can make environments: on PATH, among pyenv's versions, or known to uv. Downloads nothing."""
    candidates: list[Path | str] = [path for name in ("python3.11", "python") if (path := shutil.which(name))]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates += sorted(pyenv.glob("versions/3.11*/bin/python"))
    if uv := shutil.which("uv"):
        command = [uv, "python", "find", "3.11", "--no-python-downloads"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        candidates += found.stdout.split("\n")[:1] if found.returncode == 0 else []
    for python in candidates:
        if is_python_311(python):
            return str(python)
    raise NoPyTorchError("no Python 3.11 with venv and pip was found (PATH, pyenv, uv)")


def run_bounded(command: list[str], seconds: int, what: str) -> None:
    """Run a step of the installation; NoPyTorchError with the end of its output if it fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise NoPyTorchError(f"{what} took longer than {seconds} s") from None
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
        raise NoPyTorchError(f"{what} failed with status {done.returncode}: {lines[-1]}")


def pytorch_environment() -> Path:
    """The Python of a cached environment with the capture script's dependencies, made where it is missing."""
    dependencies = script_dependencies()
    [version] = (name.partition("==")[2] for name in dependencies if name.startswith("torch=="))
    folder = cache_root() / f"torch-{version}"
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    check = f"import torch, numpy, safetensors; assert torch.__version__.split('+')[0] == '{version}'"
    if python.exists() and subprocess.run([python, "-c", check], capture_output=True, check=False).returncode == 0:
        return python
    run_bounded([find_python_311(), "-m", "venv", "--clear", str(folder)], 120, "making an environment")
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    run_bounded([*pip, *dependencies], INSTALL_SECONDS, f"installing {' '.join(dependencies)}")
    run_bounded([str(python), "-c", check], 120, "importing PyTorch")
    return python


def differences(new: Capture, old: Capture) -> list[str]:
    """What keeps two captures from being the same, a line each; empty if nothing does."""
    found = [
        f"{name}: now {getattr(new, name)!r}, committed {getattr(old, name)!r}"
        for name in ("recipe", "rounding_order")
        if getattr(new, name) != getattr(old, name)
    ]
    tensors = [{f"layer {n} {s}": a for n, stages in c.layers.items() for s, a in stages.items()} for c in (new, old)]
    return found + tensor_differences(tensors[0], tensors[1], ("input", "expert_ids"))


def tensor_differences(
    new: Mapping[str, np.ndarray], old: Mapping[str, np.ndarray], exact: tuple[str, ...]
) -> list[str]:
    """The same of tensors by name; those whose names end in one of `exact` must be equal to the bit."""
    if new.keys() != old.keys():
        return [f"other tensors: {sorted(new.keys() ^ old.keys())}"]
    found = []
    for name, a in new.items():
        b = old[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            found.append(f"{name}: now {a.shape} {a.dtype}, committed {b.shape} {b.dtype}")
        elif name.endswith(exact):
            if a.tobytes() != b.tobytes():
                found.append(f"{name}: differs, and must not by a bit")
        elif (error := relative_l2(a, b)) > CLOSE:
            found.append(f"{name}: relative L2 {error:.1e}, more than {CLOSE:.0e}")
    return found


def relative_l2(a: np.ndarray, b: np.ndarray) -> float:
    """NaN, which no comparison lets pass, counts as infinitely far."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    error = float(np.linalg.norm(x - y) / np.linalg.norm(y))
    return error if np.isfinite(error) else np.inf


def banner(reason: str) -> None:
    line = "!" * 100
    print(f"\n{line}\n{line}\n!!  PYTORCH GOLDENS WERE NOT REMADE: {reason}", file=sys.stderr)
    print(f"!!  The committed goldens were neither confirmed nor refuted.\n{line}\n{line}\n", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--update", action="store_true", help="replace the committed golden by the new one")
    update = parser.parse_args().update
    try:
        python = pytorch_environment()
    except NoPyTorchError as error:
        banner(str(error))
        return 1 if update else 0
    with tempfile.TemporaryDirectory() as folder:
        stages, gradients = Path(folder) / GOLDEN.name, Path(folder) / GRADIENTS.name
        tiny = write_checkpoint(Path(folder) / "tiny", TINY)
        for checkpoint, made, more in ((default_checkpoint(), stages, ()), (tiny, gradients, ("--gradients",))):
            command = [str(python), str(CAPTURE_SCRIPT), str(checkpoint), str(made), *CAPTURE_ARGUMENTS, *more]
            subprocess.run(command, check=True, timeout=CAPTURE_SECONDS)
        found = differences(Capture.open(stages), Capture.open(GOLDEN)) if GOLDEN.exists() else [f"no {GOLDEN} yet"]
        if GRADIENTS.exists():
            found += tensor_differences(SafetensorsFile(gradients), SafetensorsFile(GRADIENTS), (".out", "0.x", "1.x"))
        else:
            found += [f"no {GRADIENTS} yet"]
        if update:
            shutil.copyfile(stages, GOLDEN)
            shutil.copyfile(gradients, GRADIENTS)
    if found:
        print("The PyTorch goldens differ from what PyTorch makes now:", *found, sep="\n  ", file=sys.stderr)
        print("They were replaced." if update else "With --update they would be replaced.", file=sys.stderr)
    else:
        print("PyTorch goldens remade: they agree with the committed files.")
    return 1 if found and not update else 0


if __name__ == "__main__":
    sys.exit(main())
