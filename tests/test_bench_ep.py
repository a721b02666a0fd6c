"""`k3jax bench --op ep`: what ranks send, by hand, a run on simulated devices, and what it says in failing."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from mesh_layers import CONFIG
from typer.testing import CliRunner, Result

from k3jax.bench import ep_calls, ep_run
from k3jax.bench.ep_cases import EpCase, Sent, bytes_sent
from k3jax.bench.layer_cases import LayerCase
from k3jax.bench.timing import Timing
from k3jax.cli import app
from k3jax.moe import moe_layout
from k3jax.options import LoadOptions
from sharding import make_mesh

SIZES = {"groups": 4, "picks": 2, "model": 64, "hidden": 32, "width": 32, "shared": 1}


def bench(*arguments: object) -> Result:
    command = ["bench", "--op", "ep", *(f"--{name}={size}" for name, size in SIZES.items()), *arguments]
    return CliRunner().invoke(app, [str(argument) for argument in command])


@pytest.fixture
def quick_compilation() -> Iterator[None]:
    """What is compiled here runs a few times."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def test_parts_of_one_device() -> None:
    def parts(tokens: int) -> list[tuple[int, int]]:
        case = EpCase(LayerCase("w4a16", 2 * tokens, groups=896), 2, tokens)
        return [(part.start, part.stop) for part in case.parts]

    assert parts(64) == [(0, 128)]
    assert parts(4096) == [(0, 8192)]
    assert parts(8192) == [(0, 8192), (8192, 16384)]
    assert parts(4097) == [(0, 4097), (4097, 8194)]


@pytest.mark.parametrize(("recipe", "row"), [("w4a16", 2 * 32), ("w4a8", 32 + 1)])
def test_bytes_of_four_tokens(recipe: str, row: int) -> None:
    """Two ranks of eight experts. Tokens 0 and 2 pick of both, 1 of its own, 3 of the other."""
    ids = np.array([[0, 8], [1, 2], [9, 3], [4, 5]])
    row, back = row + 2 * (4 + 4), 32 * 4  # with ids and weights; float32
    for transport, out, home in (("all_gather", 2 * row, 2 * back), ("per_rank", 1.5 * row + 8, 1.5 * back)):
        layout = moe_layout(CONFIG, recipe, make_mesh(expert=2), "sharded", LoadOptions(transport=transport))
        sent = bytes_sent(ids, CONFIG, layout)
        assert (sent.dispatch, sent.combine) == (out, home), transport


@pytest.mark.usefixtures("quick_compilation")
def test_a_run_on_simulated_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, bare = tmp_path / "bench.json", []
    program = ep_calls.all_to_all_program

    def count(*given: Any) -> Any:
        bare.append(program(*given))
        return bare[-1]

    monkeypatch.setattr(ep_calls, "all_to_all_program", count)
    done = bench("--mesh", "expert=2", "--tokens", "6", "--recipe", "bf16", "--repeats", 2, "--json", file)
    assert done.exit_code == 0, done.output
    rows = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert [row["transport"] for row in rows] == ["all_gather", "per_rank"]
    for row, (out, home) in zip(rows, (bare[:2], bare[2:]), strict=True):
        expected = {"op": "ep", "recipe": "bf16", "implementation": "xla", "ranks": 2, "tokens": 6, **SIZES, "seed": 0}
        assert {name: row[name] for name in expected} == expected
        assert row["device"] == f"2 x {jax.devices()[0].device_kind}"
        for name, exchange in (("dispatch", out), ("combine", home)):
            (numbers,) = exchange.operands
            assert numbers.nbytes == 2 * 2 * np.ceil(row[f"{name}_bytes"]), "half of a rank's part stays there"
            assert row[f"{name}_gbs"] == pytest.approx(row[f"{name}_bytes"] / row[f"{name}_us"] / 1e3)
            rate = row[f"{name}_bytes"] / row[f"{name}_all_to_all_us"] / 1e3
            assert row[f"{name}_all_to_all_gbs"] == pytest.approx(rate)
        ours = row["dispatch_us"] + row["combine_us"]
        bare_us = row["dispatch_all_to_all_us"] + row["combine_all_to_all_us"]
        assert row["all_to_all_share"] == pytest.approx(bare_us / ours)
        assert row["exchange_gbs"] == pytest.approx((row["dispatch_bytes"] + row["combine_bytes"]) / ours / 1e3)
        assert row["speedup"] == pytest.approx(row["one_device_us"] / row["layer_us"])
        assert row["layer_tokens_per_second"] == pytest.approx(12 / row["layer_us"] * 1e6)
        assert (row["one_device_parts"], row["timer"]) == (1, "wall")
        assert min(row["experts_us"], row["link_gbs"]) > 0
        assert 0 <= row["error"] < 5e-4
    assert (rows[0]["dispatch_bytes"], rows[0]["combine_bytes"]) == (6 * (2 * 32 + 16), 6 * 4 * 32)
    assert rows[1]["combine_bytes"] <= rows[0]["combine_bytes"]
    assert "bf16, 2 ranks of 4 experts" in done.stdout
    assert "6 per_rank" in done.stdout
    assert "…" not in done.stdout, "80 columns hold everything"


def test_the_error() -> None:
    truth = np.array([[3.0, 4.0]], jax.numpy.bfloat16)
    assert ep_run.relative_error(truth, truth) == 0
    assert ep_run.relative_error(2 * truth, truth) == 1
    assert np.isnan(ep_run.relative_error(truth * np.array(np.nan, truth.dtype), truth))


@pytest.mark.parametrize("error", [float("nan"), 7e-3])
def test_a_wrong_output_is_not_a_success(error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(request: Any, cases: Any, *rest: Any) -> ep_run.EpRun:
        timing = Timing(1.0, 1.0, 1.0, "wall")
        parts, bare = dict.fromkeys(ep_run.PARTS, timing), dict.fromkeys(("dispatch", "combine"), timing)
        result = ep_run.EpResult(cases[0], "per_rank", "xla", parts, bare, Sent(1.0, 1.0), timing, timing, error)
        return ep_run.EpRun("none", jax.__version__, "wall", 1.0, (result,))

    monkeypatch.setattr(ep_run, "measure", measure)
    done = bench("--mesh", "expert=2", "--tokens", "4", "--recipe", "w4a16")
    assert done.exit_code == 1, done.output
    assert f"4 per_rank: not one device's output, relative L2 {error:.1e} where 0.006 is allowed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "op ep is for ranks of expert alone, at least two, such as --mesh expert=2"),
        (("--mesh", "expert=2,tensor=2"), "op ep is for ranks of expert alone"),
        (("--mesh", "expert=16"), "needs 16 devices; there are 8"),
        (("--mesh", "expert=2", "--op", "ep,w13"), "ask for it alone, not for ep, w13"),
        (("--mesh", "expert=2", "--op", "w13"), "op ep, and no other, runs over a mesh"),
        (("--mesh", "expert=2", "--tokens", "0"), "tokens=0 must be at least 1"),
        (("--mesh", "expert=2", "--picks", "9"), "picks=9 of a token exceed groups=8"),
    ],
)
def test_a_mistake_is_one_message_and_status_2(arguments: tuple[str, ...], message: str) -> None:
    done = bench(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stdout == ""
