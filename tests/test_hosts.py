"""Evaluation over several processes: the result is the one-process run's, and a killed process ends the others."""

import json
import os
import runpy
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from checkpoint_edits import tiny_config
from numerics import relative_l2

from k3jax.checkpoint.synthetic import write_checkpoint
from k3jax.compare.capture import Capture
from k3jax.evaluation.results import capture_writer
from k3jax.evaluation.run import LayerStatistics, Layout, Request, evaluate, plan
from sharding import parse_mesh

SCRIPTS = Path(__file__).parent.parent / "scripts"
TOKENS = 37  # no mesh here divides it


@pytest.fixture(scope="module")
def hosts() -> Iterator[Any]:
    """The launcher's class `LocalHosts`; its processes compile in half the time."""
    with pytest.MonkeyPatch.context() as patch:
        flags = os.environ.get("XLA_FLAGS", "")
        patch.setenv("XLA_FLAGS", f"{flags} --xla_backend_optimization_level=0".strip())
        yield runpy.run_path(str(SCRIPTS / "launch_hosts.py"))["LocalHosts"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(num_experts=16, top_k=4, expert_width=64, layers=2)
    folder = tmp_path_factory.mktemp("hosts")
    np.save(folder / "tokens.npy", np.random.default_rng(5).standard_normal((TOKENS, 96), np.float32))
    return write_checkpoint(folder / "checkpoint", config)


def in_one_process(folder: Path, mesh: str, layout: Layout) -> tuple[Capture, list[LayerStatistics]]:
    path = folder.parent / f"one-{layout}.safetensors"
    request = Request(
        checkpoint=folder, tokens=folder.parent / "tokens.npy", mesh=parse_mesh(mesh), layout=layout, batch=16
    )
    planned = plan(request)
    with capture_writer(path, planned) as keep:
        statistics = list(evaluate(planned, keep=keep))
    return Capture.open(path), statistics


def evaluation(folder: Path, mesh: str, layout: str, *more: str) -> list[str]:
    program = [str(SCRIPTS / "evaluate.py"), str(folder), str(folder.parent / "tokens.npy"), "--hosts", "auto"]
    return [*program, "--mesh", mesh, "--tokens-layout", layout, "--batch", "16", *more]


@pytest.mark.parametrize(
    ("processes", "mesh", "layout", "gpus"),
    [
        (2, "expert=4,tensor=2", "replicated", False),
        (4, "expert=8", "sharded", False),
        pytest.param(2, "expert=2", "sharded", True, marks=pytest.mark.gpu2),
    ],
)
def test_several_hosts_give_one_host_s_result(
    hosts: Any, folder: Path, tmp_path: Path, processes: int, mesh: str, layout: Layout, gpus: bool
) -> None:
    outputs: tuple[str, ...] = ("--output", str(tmp_path / "out.safetensors"), "--json", str(tmp_path / "out.json"))
    if layout == "sharded":
        outputs += ("--transport", "per_rank")
    devices = 2 if gpus else 8
    with hosts(evaluation(folder, mesh, layout, *outputs), processes, devices // processes, gpus=gpus) as running:
        assert running.wait(grace=10, limit=300) == [0] * processes, running.lines
    expected, statistics = in_one_process(folder, mesh, layout)
    found = Capture.open(tmp_path / "out.safetensors")
    values = json.loads((tmp_path / "out.json").read_text())
    assert (values["hosts"], values["devices"]) == (processes, f"{devices} x {jax.devices()[0].device_kind}")
    assert list(found.layers) == list(expected.layers) == [0, 1]
    for layer, told in zip(statistics, values["layers"], strict=True):
        mine, theirs = expected.layers[layer.layer], found.layers[layer.layer]
        np.testing.assert_array_equal(mine["input"], theirs["input"])
        # Sums over ranks in another order move a few roundings to bfloat16, nothing else.
        assert relative_l2(theirs["output"], mine["output"]) < 5e-4
        assert told["rms"] == pytest.approx(layer.rms, rel=1e-4)
        assert (told["expert_rows"], told["rank_rows"]) == (list(layer.expert_rows), list(layer.rank_rows))
        assert told["tokens"] == TOKENS
    lines = [line for process, line in running.lines if process == 0 and line.startswith("layer ")]
    assert len(lines) == 2
    assert not [line for process, line in running.lines if process and line.startswith("layer ")]


def test_a_killed_host_ends_the_others(hosts: Any, folder: Path, tmp_path: Path) -> None:
    """Within JAX's timeout, with an error, and without a result that could be taken for one."""
    output = tmp_path / "out.safetensors"
    heartbeat = 5
    command = evaluation(folder, "expert=2", "replicated", "--heartbeat", str(heartbeat), "--output", str(output))
    with hosts(command, 2) as running:
        deadline = time.monotonic() + 120
        while not any(line.startswith("layer 0") for _, line in running.lines):
            assert not any(process.poll() for process in running.processes), running.lines
            assert time.monotonic() < deadline, running.lines
            time.sleep(0.02)
        running.processes[1].kill()
        start = time.monotonic()
        statuses = running.wait(grace=3 * heartbeat)
        assert time.monotonic() - start < 3 * heartbeat
    assert statuses[1] == -signal.SIGKILL
    assert statuses[0] not in (0, None)
    assert not output.exists()


def test_how_hosts_are_told_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    join = runpy.run_path(str(SCRIPTS / "evaluate.py"))["join"]
    met: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    timeouts = {"heartbeat_timeout_seconds": 7, "shutdown_timeout_seconds": 7}
    with monkeypatch.context() as patch:
        patch.setattr(jax.distributed, "initialize", lambda *where, **named: met.append((where, named)))
        for hosts in ("one", "auto", "node-3:1234,4,0"):
            join(hosts, 7)
    assert met == [((), timeouts), (("node-3:1234", 4, 0), timeouts)]
    for hosts in ("", "two", "node-3,4,0", "node-3:1234,4", "node-3:1234,four,0"):
        with pytest.raises(ValueError, match="must be one, auto or HOST:PORT,N,I"):
            join(hosts, 7)

    def no_cluster(**_: Any) -> None:
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", no_cluster)
    with pytest.raises(ValueError, match="JAX detects no cluster here"):
        join("auto", 7)
