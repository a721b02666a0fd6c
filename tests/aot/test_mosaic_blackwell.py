"""Mosaic's kernels compiled for Blackwell, in a process of their own: Mosaic ties each to one architecture."""

import os
import subprocess
import sys
from pathlib import Path

from compiled_mosaic import TARGET_VARIABLE

HERE = Path(__file__).parent
FILES = (
    "test_row_kernels.py",
    "test_mosaic_moves.py",
    "test_mosaic_orders.py",
    "test_order_ptx.py",
    "test_store_ptx.py",
    "blackwell_matmul.py",
)


def test_the_programs_are_the_ones_we_think_they_are() -> None:
    files = [str(HERE / file) for file in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *files]
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {TARGET_VARIABLE: "blackwell"}
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
