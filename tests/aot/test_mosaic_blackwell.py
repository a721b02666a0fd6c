"""Mosaic's kernels compiled for Blackwell, each file in its own process, which Mosaic ties to one architecture."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from compiled_mosaic import TARGET_VARIABLE

HERE = Path(__file__).parent


@pytest.mark.parametrize("file", ["test_row_kernels.py", "test_mosaic_moves.py", "blackwell_matmul.py"])
def test_the_programs_are_the_ones_we_think_they_are(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(HERE / file)]
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {TARGET_VARIABLE: "blackwell"}
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
