"""The unmodified Triton kernels on a CPU, in a process of their own: Triton decides when it is imported."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).with_name("interpreted_triton.py")


def test_the_kernels_agree_with_the_references() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--override-ini", "addopts=", str(TESTS)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
