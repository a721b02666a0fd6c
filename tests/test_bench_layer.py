"""`k3jax bench --op layer`: what each stage has to do, by hand at the release's sizes, and a run at small ones."""

import json
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from k3jax.bench import peers
from k3jax.bench.cases import even_picks
from k3jax.bench.layer_cases import STAGES, LayerCase, layer_work, routed_work, stage_work
from k3jax.cli import app

CEILINGS = {"read": 4.37e12, "copy": 3.26e12, "bf16": 744e12, "fp8": 1445e12}
EXPERT = 17_547_264  # bytes of one expert's six tensors in the release


def test_the_weights_that_a_token_needs() -> None:
    """16 experts, 264.2 MB of shared experts, 102.8 MB of latent projections, and a router: 12.8 MB over all 896."""
    whole = layer_work(LayerCase("w4a16", 1, groups=896), experts_hit=16)
    dense = 2 * (3 * 6144 * 7168 + 2 * 3584 * 7168 + 3584)
    assert whole.weight_bytes == 16 * EXPERT + dense + 896 * (2 * 7168 + 4)
    assert whole.weight_bytes == pytest.approx(660.6e6, rel=1e-4)
    assert whole.floor_us("w4a16", CEILINGS) == pytest.approx(151.2, abs=0.1)
    of_112 = layer_work(LayerCase("w4a16", 1), experts_hit=16)
    assert whole.weight_bytes - of_112.weight_bytes == 784 * (2 * 7168 + 4)
    assert of_112.weight_bytes == pytest.approx(649.4e6, rel=1e-4)
    assert layer_work(LayerCase("bf16", 1), 16).weight_bytes - of_112.weight_bytes == 16 * EXPERT * (64 / 17 - 1)


def test_what_stages_have_to_do_at_1024_tokens() -> None:
    case = LayerCase("w4a8_fp8", 1024)
    work = stage_work(case, experts_hit=112)
    assert tuple(work) == case.stages == STAGES
    assert sum(work[stage].weight_bytes for stage in ("w13", "w2")) == 112 * EXPERT
    assert work["w13"].floor_us("w4a8_fp8", CEILINGS) == pytest.approx(499, rel=1e-3)
    assert work["w2"].floor_us("w4a8_fp8", CEILINGS) == pytest.approx(250, rel=2e-3)
    dense = layer_work(LayerCase("w4a16", 1024, groups=896), 896).dense_flop
    assert dense / CEILINGS["bf16"] == pytest.approx(0.52e-3, rel=0.01)
    assert work["combine"].bytes == 16384 * (2 * 3584 + 8) + 4 * 1024 * 3584
    assert work["quantize_tokens"].bytes == 1024 * (3 * 3584 + 4)
    assert work["gather"].bytes == (1024 + 16384) * (3584 + 4) + 4 * 16384
    assert work["schedule"].bytes == 12 * 16384 + 4 * 112
    routed = routed_work(case, 112)
    assert routed.expert_flop == 2 * 16384 * 3 * 3584 * 3072
    assert routed.bytes == 112 * EXPERT + 4 * 1024 * 3584 + 8 * 16384
    plain = LayerCase("w4a16", 1024, shared=0)
    assert set(STAGES) - set(plain.stages) == {"quantize_tokens", "quantize_hidden", "shared"}
    assert stage_work(plain, 112)["w13"].floor_us("w4a16", CEILINGS) == pytest.approx(970, rel=1e-3)


def test_picks_are_distinct_and_even() -> None:
    for tokens, picks, groups in ((1, 16, 16), (12, 2, 8), (256, 16, 112), (64, 16, 896)):
        ids = even_picks(tokens, picks, groups, seed=3)
        assert ids.shape == (tokens, picks)
        assert ids.dtype == np.int32
        assert all(len(set(of_token)) == picks for of_token in ids.tolist())
        rows = np.bincount(ids.reshape(-1), minlength=groups)
        assert rows.size == groups
        assert rows.max() - rows.min() <= 1
        np.testing.assert_array_equal(ids, even_picks(tokens, picks, groups, seed=3))
    assert not np.array_equal(ids, even_picks(tokens, picks, groups, seed=4))


@pytest.fixture
def quick_compilation() -> Iterator[None]:
    """What is compiled here runs once or twice."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def humming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the program that times Humming's routed path, which answers with what it was asked."""
    program = tmp_path / "peer.py"
    program.write_text(
        "import json, sys\n"
        "asked = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "expected = {'tokens': '12', 'groups': '8', 'picks': '2', 'hidden': '64', 'width': '32', 'seed': '0'}\n"
        "expected['activations'] = 'float8e4m3'\n"
        "assert {name: asked.pop(f'--{name}') for name in expected} == expected\n"
        "assert [*asked] == ['--json'], asked\n"
        "record = {'tokens': 12, 'activations': 'float8e4m3', 'humming': '0.1.19', 'torch': '2.11.0'}\n"
        "times = {'indexed': 1e-3, 'grouped_contiguous': 2e-3}\n"
        "records = [record | {'layout': name, 'us': us, 'kernel_us': us / 2} for name, us in times.items()]\n"
        "json.dump(records, open(asked['--json'], 'w'))\n"
    )
    monkeypatch.setattr(peers, "LAYER_PROGRAM", program)


@pytest.mark.usefixtures("quick_compilation", "humming")
def test_a_layer_stage_by_stage(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    sizes = {"groups": 8, "picks": 2, "model": 128, "hidden": 64, "width": 32, "shared": 1}
    arguments = ["bench", "--op", "layer", "--tokens", "12", "--recipe", "w4a8_fp8", "--repeats", "1"]
    arguments += ["--implementation", "reference"]  # the quickest to compile
    arguments += [f"--{name}={size}" for name, size in sizes.items()]
    done = CliRunner().invoke(app, [*arguments, "--breakdown", "--peers", "--json", str(file)])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(file.read_text(), parse_constant=pytest.fail)
    expected = {"op": "layer", "recipe": "w4a8_fp8", "implementation": "reference", "tokens": 12}
    expected |= {"seed": 0, "timer": "wall", **sizes}
    assert {name: row[name] for name in expected} == expected
    assert row["jax"] == jax.__version__
    assert row["ceilings"].keys() == CEILINGS.keys()
    assert (row["experts_hit"], row["rows_max"]) == (8, 3), "picks fall evenly"
    assert tuple(row["stages"]) == STAGES
    for timed in (row, *row["stages"].values()):
        assert 0 < timed["us_min"] <= timed["us"] <= timed["us_max"]
        assert timed["floor_us"] > 0
        assert timed["bytes"] > 0
    work = layer_work(LayerCase("w4a8_fp8", 12, **sizes), 8)
    assert (row["weight_bytes"], row["bytes"], row["flop"]) == (work.weight_bytes, work.bytes, work.flop)
    assert row["weight_share"] == pytest.approx(work.weight_bytes / row["us"] * 1e6 / row["ceilings"]["read"])
    assert row["gemm_us"] == row["stages"]["w13"]["us"] + row["stages"]["w2"]["us"]
    assert row["routed_ratio"] == pytest.approx(row["routed_us"] / row["gemm_us"])
    assert 0 < row["compile_s"] < 60
    faster = {"us": 1e-3, "kernel_us": 5e-4, "layout": "indexed"}
    assert {name: row[f"humming_routed_{name}"] for name in faster} == faster
    (beside,) = [line for line in done.stdout.splitlines() if "indexed" in line]
    assert f"{row['routed_us'] / 5e-4:.2f}" in beside.split()
    assert "Humming 0.1.19 with torch 2.11.0" in done.stdout
    assert "not timed" not in done.stdout
    assert "layer, reference: 8 experts, 2 picks, [tokens, 128]" in done.stdout
    assert "12 w4a8_fp8: 8 experts hit, 3 rows at most" in done.stdout
    assert "…" not in done.stdout, "80 columns hold everything"


def test_a_peer_that_is_not_there_is_named() -> None:
    case = LayerCase("w4a16", 8)
    absent = peers.Peers((case, LayerCase("w4a8", 8)))
    absent.time_humming(None)
    assert len(absent.notes) == 1
    assert absent.notes[0].startswith("Humming is not timed: torch is not importable by")
    assert absent.layer_figures(case) == dict.fromkeys(
        f"humming_routed_{name}" for name in ("us", "kernel_us", "layout")
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--picks", "9", "--groups", "8"), "picks=9 of a token exceed groups=8"),
        (("--tokens", "0"), "tokens=0 must be at least 1"),
        (("--model", "0"), "model=0 must be at least 1"),
        (("--distribution", "zipf"), "--distribution is for w13 and w2, not for layer"),
        (("--implementation", "mosaic"), "it is written for compute capability 9.0 or 10.0"),
    ],
)
def test_a_mistake_is_one_message_and_status_2(arguments: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "--op", "layer", *arguments])
    assert done.exit_code == 2
    assert message in done.stderr
