"""The launcher of several processes: they are one cluster, none outlives its launcher, a dead one ends the others."""

import fcntl
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "launch_hosts.py"
SILENT = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"


@pytest.fixture(scope="module")
def hosts() -> Any:
    """The script's class `LocalHosts`."""
    return runpy.run_path(str(SCRIPT))["LocalHosts"]


def program(folder: Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text(text)
    return str(path)


def until(condition: Any) -> None:
    deadline = time.monotonic() + 300  # a busy machine may take long; what is waited for sleeps twice as long
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_first_failure_ends_all_with_status_1(tmp_path: Path) -> None:
    text = "import os, sys, time\nif os.environ['SLURM_PROCID'] == '1':\n    sys.exit(7)\ntime.sleep(600)\n"
    command = [sys.executable, str(SCRIPT), "--processes", "3", "--grace", "0.2", program(tmp_path, text)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "process 1 ended with status 7" in done.stderr
    assert "process 0 still ran 0.2 s after another failed, and was ended" in done.stderr


def test_what_processes_say_comes_with_their_number(tmp_path: Path) -> None:
    text = "import os\nprint('of', os.environ['SLURM_NTASKS'], os.environ['JAX_NUM_CPU_DEVICES'])\n"
    command = [sys.executable, str(SCRIPT), "--processes", "2", "--devices", "3", program(tmp_path, text), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] of 2 3", "[1] of 2 3"]


def test_nothing_outlives_a_failing_block(tmp_path: Path, hosts: Any) -> None:
    """Not even the children of its processes, each of which holds a lock as long as it lives."""
    lock = tmp_path / "lock"
    child = f"import fcntl\nfile = open({str(lock)!r}, 'w')\nfcntl.flock(file, fcntl.LOCK_SH)\n" + SILENT
    parent = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}])\n" + SILENT
    started: list[Any] = []
    with pytest.raises(ZeroDivisionError), hosts([program(tmp_path, parent)], 2) as running:  # noqa: PT012
        started += running.processes
        until(lambda: len(running.lines) == 4)  # two processes and a child of each
        _ = 1 / 0
    assert [process.poll() for process in started] == [-signal.SIGTERM] * 2
    with lock.open() as file:
        until(lambda: is_free(file))


def is_free(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def test_nothing_outlives_a_launcher_that_is_told_to_end(tmp_path: Path) -> None:
    text = "import os\nprint(os.getpid(), flush=True)\n" + SILENT
    command = [sys.executable, str(SCRIPT), "--processes", "2", program(tmp_path, text)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        lines = [launcher.stdout.readline() for _ in range(4)]
        pids = [int(found[1]) for line in lines if (found := re.fullmatch(r"\[\d\] (\d+)\n", line))]
        assert len(pids) == 2
        launcher.terminate()
        assert launcher.wait(timeout=300) == 128 + signal.SIGTERM
    until(lambda: not any(map(is_running, pids)))
