"""Fails if a test file is collected by none of CI's runs: a forgotten file would pass for ever."""

import subprocess
import sys
from pathlib import Path

# The folders that `.ci/run` names to pytest; a plain run leaves tests/aot out, and it needs its own dependencies.
AOT = Path("tests/aot")


def collected() -> set[Path]:
    """The files of which a plain `pytest` collects at least one test."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--no-header"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"pytest could not collect the tests:\n{result.stdout}{result.stderr}")
    return {Path(line.split("::")[0]) for line in result.stdout.splitlines() if "::" in line}


def main() -> None:
    """Compares the test files in the tree with those that a run collects."""
    present = {path for pattern in ("test_*.py", "*_test.py") for path in Path().glob(f"tests/**/{pattern}")}
    in_aot = {path for path in present if path.is_relative_to(AOT)}
    missed = sorted(present - in_aot - collected())
    if missed:
        sys.exit("no run collects a test from: " + ", ".join(map(str, missed)))
    print(f"{len(present)} test files, all collected")


if __name__ == "__main__":
    main()
