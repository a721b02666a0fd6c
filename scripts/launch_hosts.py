"""Starts a Python program as several processes of this machine that take each other for hosts of a cluster.

uv run scripts/launch_hosts.py --processes 4 --devices 2 program.py --its-own --options    # simulated CPU devices
uv run scripts/launch_hosts.py --processes 2 --gpus program.py --its-own --options         # a GPU for each process

Each process finds the variables that a SLURM step has, so `jax.distributed.initialize()` detects the "cluster" as it
would a real one, on a free port of this machine's loopback interface. Every process is the head of a process group;
when one fails, the others get `--grace` seconds to fail by themselves (JAX notices a dead host after its heartbeat
timeout), then all groups are killed, as they are whenever the launcher ends for whatever reason but a kill -9.
Exit status: 0 if all processes end with 0, else 1.
"""

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Self

import typer

ROOT = Path(__file__).resolve().parent.parent
_POLL = 0.05
_TERMINATION = 5.0  # Seconds that a process has to end after SIGTERM, before SIGKILL.


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port: int = listener.getsockname()[1]
        return port


def host_environment(process: int, processes: int, devices: int, port: int, *, gpus: bool = False) -> dict[str, str]:
    """This process's environment with a SLURM step's variables, and `devices` simulated CPU devices.

    With `gpus`, JAX takes the GPU of the process's number among those of the machine, as it does for a SLURM task.
    """
    platform = {"JAX_PLATFORMS": "cuda"} if gpus else {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    slurm = {"JOB_ID": "1", "STEP_NODELIST": "localhost", "NTASKS": processes, "PROCID": process, "LOCALID": process}
    return (
        os.environ
        | {f"SLURM_{name}": str(value) for name, value in slurm.items()}
        | {
            **platform,
            "JAX_COORDINATOR_PORT": str(port),
            "JAX_COORDINATOR_BIND_ADDRESS": f"localhost:{port}",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }
    )


class LocalHosts:
    """`processes` copies of the program `command`, a context that none of them outlives.

    Attributes:
        processes: in the order of their process ids in JAX. lines: what they said, `(process, line)`, as it came.
    """

    def __init__(
        self,
        command: Sequence[str],
        processes: int,
        devices: int = 1,
        say: Callable[[int, str], None] = lambda process, line: None,
        *,
        gpus: bool = False,
    ) -> None:
        self.lines: list[tuple[int, str]] = []
        self.processes: list[subprocess.Popen[str]] = []
        self._say = say
        self._readers: list[threading.Thread] = []
        port = free_port()
        try:
            for process in range(processes):
                self._start(command, process, host_environment(process, processes, devices, port, gpus=gpus))
        except BaseException:
            self.close()
            raise

    def _start(self, command: Sequence[str], process: int, environment: dict[str, str]) -> None:
        started = subprocess.Popen(
            [sys.executable, "-u", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.processes.append(started)
        self._readers.append(threading.Thread(target=self._read, args=(process, started), daemon=True))
        self._readers[-1].start()

    def _read(self, process: int, started: "subprocess.Popen[str]") -> None:
        assert started.stdout is not None
        with started.stdout:
            for line in started.stdout:
                self.lines.append((process, line.rstrip("\n")))
                self._say(*self.lines[-1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, grace: float, limit: float = math.inf) -> list[int | None]:
        """Exit statuses (-N: ended by signal N) once all have ended, or `grace` seconds after the first failure.

        None stands for a process that still runs then, or after `limit` seconds.
        """
        deadline = time.monotonic() + limit
        while True:
            statuses = [process.poll() for process in self.processes]
            if any(statuses):  # neither 0 nor None
                deadline = min(deadline, time.monotonic() + grace)
                grace = math.inf  # counted from the first failure on
            if None not in statuses or time.monotonic() > deadline:
                return statuses
            time.sleep(_POLL)

    def close(self) -> None:
        """Ends every process group that is left, gently, then not."""
        for sent in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes:
                _signal_group(process.pid, sent)
            deadline = time.monotonic() + _TERMINATION
            while any(process.poll() is None for process in self.processes) and time.monotonic() < deadline:
                time.sleep(_POLL)
        for reader in self._readers:
            reader.join(_TERMINATION)


def _signal_group(group: int, sent: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # All of it has ended.
        os.killpg(group, sent)


def _stop(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def launch(
    command: Annotated[list[str], typer.Argument(help="A Python program and its arguments.")],
    processes: Annotated[int, typer.Option(min=1, help="How many processes.")] = 2,
    devices: Annotated[int, typer.Option(min=1, help="Simulated CPU devices of each process.")] = 1,
    gpus: Annotated[bool, typer.Option("--gpus", help="One of this machine's GPUs for each process instead.")] = False,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that the others have after one fails.")] = 150,
) -> None:
    """Run a Python program as several processes of this machine that take each other for hosts of a cluster."""
    for caught in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(caught, _stop)
    if gpus and devices != 1:
        raise typer.BadParameter("--gpus gives each process one GPU: --devices is for simulated ones")

    def say(process: int, line: str) -> None:
        print(f"[{process}] {line}", flush=True)

    with LocalHosts(command, processes, devices, say, gpus=gpus) as run:
        statuses = run.wait(grace)
    for process, status in enumerate(statuses):
        if status is None:
            print(f"process {process} still ran {grace:g} s after another failed, and was ended", file=sys.stderr)
        elif status:
            how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
            print(f"process {process} ended {how}", file=sys.stderr)
    raise SystemExit(0 if not any(status != 0 for status in statuses) else 1)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(context_settings={"allow_interspersed_args": False})(launch)

if __name__ == "__main__":
    app()
