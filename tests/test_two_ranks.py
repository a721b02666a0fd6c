"""Two ranks against one device: on two GPUs of one host, by one process or two; the tests themselves on a CPU's."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from two_ranks import LAYOUTS, SIZES, require_contract, require_equal_layers, require_repeatable, transfers

from k3jax.experts import RECIPES
from sharding.ragged import padded_all_to_all

HERE = Path(__file__).parent
PROGRAM = HERE / "two_ranks.py"
REPEATS = 200
LATENCY_HIDING = "--xla_gpu_enable_latency_hiding_scheduler"
ON_A_CPU = ("per-rank-ep2", "w4a8")


def on_both(name: str, recipe: str) -> list[Any]:
    """The case on two GPUs, and on a CPU at small sizes: one of them, the matrix of eight devices has the rest."""
    on_a_cpu = () if (name, recipe) == ON_A_CPU else pytest.mark.slow
    return [
        pytest.param("real", name, recipe, marks=pytest.mark.gpu2),
        pytest.param("small", name, recipe, marks=on_a_cpu),
    ]


CASES = [case for recipe in RECIPES for name in LAYOUTS for case in on_both(name, recipe)]


@pytest.mark.parametrize(("sizes", "name", "recipe"), CASES)
def test_two_ranks_are_one_device(sizes: str, name: str, recipe: str) -> None:
    require_equal_layers(SIZES[sizes], name, recipe)
    require_repeatable(SIZES[sizes], name, recipe, REPEATS if sizes == "real" else 2)


@pytest.mark.parametrize(
    ("sizes", "exchange"),
    [
        pytest.param("real", "native", marks=pytest.mark.gpu2),
        pytest.param("real", "emulated", marks=pytest.mark.gpu2),
        pytest.param("small", "emulated"),
    ],
)
def test_a_ragged_all_to_all_keeps_its_contract(sizes: str, exchange: str) -> None:
    """XLA's own collective, which only GPUs have, and what a CPU does in its place."""
    how = {"exchange": padded_all_to_all} if exchange == "emulated" else {}
    for transfer in transfers(SIZES[sizes]):
        require_contract(transfer, **how)


@pytest.mark.gpu2
@pytest.mark.parametrize("hides_latency", ["true", "false"])
def test_either_scheduler(hides_latency: str) -> None:
    """All of it in a process whose XLA overlaps collectives, and in one whose XLA does not."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    environment = os.environ | {"XLA_FLAGS": " ".join([*flags, f"{LATENCY_HIDING}={hides_latency}"])}
    command = [sys.executable, str(PROGRAM), "--sizes", "real", "--repeats", str(REPEATS), "--recipes", "w4a16,w4a8"]
    done = subprocess.run(
        [*command, "--layouts", "gather-ep2,per-rank-ep2"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("gpus", "arguments"),
    [
        pytest.param(True, ("--sizes", "real", "--repeats", str(REPEATS)), marks=pytest.mark.gpu2),
        pytest.param(
            False, ("--recipes", "w4a8", "--layouts", "per-rank-ep2", "--repeats", "2"), marks=pytest.mark.slow
        ),
    ],
    ids=("gpus", "cpu"),
)
def test_a_process_a_device(gpus: bool, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, over NCCL or gloo."""
    if not gpus:
        monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    hosts = runpy.run_path(str(HERE.parent / "scripts" / "launch_hosts.py"))["LocalHosts"]
    with hosts([str(PROGRAM), "--hosts", *arguments], 2, gpus=gpus) as running:
        assert running.wait(grace=10, limit=300) == [0, 0], running.lines
    said = {process for process, line in running.lines if line.startswith("w4a8 per-rank-ep2: equal")}
    assert said == {0, 1}


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one rank's rows that arrive one place late, and of a result that changes once in several repeats."""
    two_ranks = sys.modules["two_ranks"]

    def late(operand: jax.Array, output: jax.Array, *, output_offsets: jax.Array, **rest: Any) -> jax.Array:
        second = jax.lax.axis_index("expert").astype(jnp.int32)  # 1 on it
        return padded_all_to_all(operand, output, output_offsets=output_offsets + second, **rest)

    with pytest.raises(AssertionError):
        require_contract(transfers(SIZES["small"])[0], exchange=late)
    small, trace, calls = SIZES["small"], two_ranks._trace(), iter(range(10))

    def wrong(*given: Any) -> dict[str, jax.Array]:
        stages = dict(trace(*given))
        stages["output"] = stages["output"] * (1 if next(calls) != 2 else 2)
        return stages

    monkeypatch.setattr(two_ranks, "_trace", lambda: wrong)
    with pytest.raises(AssertionError, match=r"of 3 repeats \[1\] differ"):
        require_repeatable(small, "per-rank-ep2", "w4a8", 3)
