"""Fails if a test file is collected by none of CI's runs (it would pass for ever), or tests are named differently in
two processes (pytest-xdist refuses to share them out).

    python .ci/collected.py              # what a plain `pytest` collects
    python .ci/collected.py tests/aot    # what `pytest tests/aot` does, where its own dependencies are installed
"""

import os
import subprocess
import sys
from pathlib import Path

# The folder that `.ci/run` names to pytest: a plain run leaves it out.
AOT = Path("tests/aot")


def collected(folder: list[str]) -> list[str]:
    """The tests that `pytest` collects in `folder` (empty: by default), in order.

    The same in two processes whose sets are ordered differently and whose objects lie elsewhere, or the program ends.
    """
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--no-header", *folder]
    runs = [
        subprocess.Popen(
            command,
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for seed in ("0", "1")
    ]
    texts = [run.communicate()[0] for run in runs]
    for run, text in zip(runs, texts, strict=True):
        if run.returncode:
            sys.exit(f"pytest could not collect the tests:\n{text}")
    first, second = ([line for line in text.splitlines() if "::" in line] for text in texts)
    differing = [f"  {one}\n  {other}" for one, other in zip(first, second, strict=False) if one != other]
    if differing or len(first) != len(second):
        sys.exit("two processes do not collect the same tests in the same order:\n" + "\n".join(differing[:5]))
    return first


def main(folder: list[str]) -> None:
    """Compares the test files in the tree with those that a run collects."""
    patterns = ("test_*.py", "*_test.py")
    present = {path for pattern in patterns for path in Path(*folder or ["tests"]).glob(f"**/{pattern}")}
    if not folder:
        present = {path for path in present if not path.is_relative_to(AOT)}
    tests = collected(folder)
    missed = sorted(present - {Path(test.split("::")[0]) for test in tests})
    if missed:
        sys.exit("no run collects a test from: " + ", ".join(map(str, missed)))
    print(f"{len(present)} test files, all collected; {len(tests)} tests, the same in every process")


if __name__ == "__main__":
    main(sys.argv[1:])
