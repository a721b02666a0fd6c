"""`k3jax compare --mesh`: the same verdicts over a mesh, what each rank did, and faults between ranks found."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_edits import tiny_checkpoint
from jax.sharding import Mesh
from layers import small_config
from test_report import Page
from typer.testing import CliRunner, Result

from k3jax.cli import app
from k3jax.compare.ranks import rank_loads
from k3jax.moe import moe_layout
from k3jax.options import LoadOptions
from sharding import Layout, make_mesh
from sharding.dispatch import ReplicatedTokens
from sharding.traffic import all_reduce_bytes

LAYOUTS = ("replicated", "sharded")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("compare_mesh"), num_experts=8, expert_width=64)


def compare(folder: Path, *arguments: object) -> Result:
    command = ["compare", "--checkpoint", folder, "--tokens", 13, "--recipe", "w4a16", *arguments]
    return CliRunner().invoke(app, [str(argument) for argument in command])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mesh_agrees_and_says_what_each_rank_did(folder: Path, tmp_path: Path, layout: str) -> None:
    json_file, report = tmp_path / "out.json", tmp_path / "report.html"
    files = ("--json", json_file, "--report", report)
    transport = ("--transport", "all_gather") if layout == "sharded" else ()
    result = compare(folder, "--mesh", "expert=4,tensor=2", "--tokens-layout", layout, *transport, *files)
    assert result.exit_code == 0, result.output
    described = ", ".join(("data=1, expert=4, tensor=2", f"{layout} tokens", *transport[1:]))
    assert described in result.stdout
    assert "By rank" in result.stdout
    values = json.loads(json_file.read_text())
    assert values["mesh"] == described
    dense, moe = values["results"]
    assert dense["ranks"] == []
    assert [(rank["data"], rank["expert"], rank["tensor"]) for rank in moe["ranks"]] == [
        (0, expert, tensor) for expert in range(4) for tensor in range(2)
    ]
    by_expert = np.array(moe["expert_load"]).reshape(4, 2).sum(axis=1)
    assert [rank["rows"] for rank in moe["ranks"]] == np.repeat(by_expert, 2).tolist()
    sent = {rank["bytes_sent"] for rank in moe["ranks"]}
    assert len(sent) == 1, "one copy a (token, rank), the default of these sizes, would depend on what tokens pick"
    words = Page(report.read_text()).words
    assert described in words
    assert {"By rank", "kB sent"} <= set(words)


CONFIG = small_config(num_experts=8, num_experts_per_token=2, moe_intermediate_size=64)
IDS = np.array([[0, 7], [2, 3], [-1, -1], [0, 1], [5, 4]])


def layout_of(mesh: Mesh | None, tokens: str, **options: Any) -> Layout:
    return moe_layout(CONFIG, "w4a16", mesh, tokens, LoadOptions(**options))


def test_ranks_of_replicated_tokens() -> None:
    loads = rank_loads(IDS, CONFIG, layout_of(make_mesh(data=2, expert=4), "replicated"))
    assert [(load.data, load.expert) for load in loads] == [(d, e) for d in range(2) for e in range(4)]
    # Three tokens a group, the second one's last is only there to make it up.
    assert [load.tokens for load in loads] == [3] * 4 + [2] * 4
    assert [load.rows for load in loads] == [1, 2, 0, 1, 2, 0, 2, 0]
    assert {load.bytes_sent for load in loads} == {3 * all_reduce_bytes(128 + 64, 4, "f32")}
    assert rank_loads(IDS, CONFIG, layout_of(None, "replicated")) == ()


def test_ranks_of_sharded_tokens() -> None:
    """Two ranks of `expert` in each of two groups; two tokens a rank, the last rank's second only makes them up."""
    mesh = make_mesh(data=2, expert=2, tensor=2)
    loads = {}
    for transport in ("all_gather", "per_rank"):
        loads[transport] = rank_loads(IDS, CONFIG, layout_of(mesh, "sharded", transport=transport))
        assert [load.tokens for load in loads[transport]] == [2, 2, 2, 2, 1, 1, 0, 0]
        assert [load.rows for load in loads[transport]] == [5, 5, 1, 1, 0, 0, 2, 2]
    row, back = 64 * 2 + 2 * 4 + 2 * 4, 64 * 4  # bfloat16 out with ids and weights, float32 back
    width = 2 * 64 * 4  # the float32 sums of two tokens over `tensor`
    every = 2 * (row + back) + width
    assert [load.bytes_sent for load in loads["all_gather"]] == [every] * 8
    counts = 2 * 2 * 4 // 2
    # Tokens 0 and 3 pick experts of their group's other rank, and so does token 4: of its rank 1.
    sent = [1 * row + 1 * back, 1 * row + 1 * back, row, back]
    assert [load.bytes_sent for load in loads["per_rank"]] == np.repeat(np.add(sent, counts + width), 2).tolist()


def test_a_cpu_simulates_the_devices_of_the_mesh(folder: Path) -> None:
    """As a user types it, where nothing has set up devices before."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    }
    command = [sys.executable, "-c", "from k3jax.cli import main; main()", "compare", "--checkpoint", str(folder)]
    command += ["--layers", "0", "--tokens", "3", "--mesh", "expert=4"]
    done = subprocess.run(
        command, env=environment | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 x cpu" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mesh", "expert=16"), "needs 16 devices; there are 8"),
        (("--mesh", "expert=3"), "expert of size 8 cannot be split evenly over 3"),
        (("--mesh", "experts=4"), "must be AXIS=SIZE"),
        (("--tokens-layout", "sharded"), "--tokens-layout sharded needs a mesh"),
        (("--mesh", "expert=4", "--transport", "per_rank"), "--transport per_rank is for --tokens-layout sharded"),
    ],
)
def test_a_mistake_is_status_2(folder: Path, arguments: tuple[Any, ...], message: str) -> None:
    result = compare(folder, "--layers", "1", *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_a_sum_that_is_not_added_up_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplicatedTokens, "total", lambda self, *parts: parts)
    result = compare(folder, "--mesh", "expert=4,tensor=2", "--layers", "1", "--tokens", "11")
    assert result.exit_code == 1, result.output
    assert "Layer 1, w4a16: first divergence at stage experts" in result.stdout
