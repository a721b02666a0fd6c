"""`k3jax bench`: its floor, how it tells time, what it prints and writes, what it says in failing."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from k3jax.bench import calls, peers, results, run, timing
from k3jax.bench.cases import DISTRIBUTIONS, GROUPS, Case, group_sizes
from k3jax.bench.timing import Activity, Stopwatch, call_times
from k3jax.cli import app

pytestmark = pytest.mark.usefixtures("quickly_compiled")
SMALL = ("--groups", 4, "--hidden", 64, "--width", 96, "--picks", 4, "--repeats", 2)
KEYS = {"op", "recipe", "implementation", "groups", "rows", "distribution", "us", "us_min", "us_max"}
KEYS |= {"tflops", "tbs", "roof_us", "compile_s", "device", "jax", "ceilings"}
CEILINGS = {"read": 4.37e12, "copy": 3.26e12, "bf16": 744e12, "fp8": 1445e12}


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *(str(argument) for argument in arguments)])


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(("rows", "groups"), [(0, 3), (1, 1), (7, 1), (1, 8), (128, 112), (65536, 112), (16384, 896)])
def test_no_row_is_lost(distribution: str, rows: int, groups: int) -> None:
    sizes = group_sizes(rows, groups, distribution, seed=3)
    assert sizes.shape == (groups,)
    assert sizes.dtype == np.int32
    assert sizes.sum() == rows
    assert sizes.min() >= 0
    np.testing.assert_array_equal(sizes, group_sizes(rows, groups, distribution, seed=3))


def test_shares_are_what_the_names_say() -> None:
    uniform, zipf, hot = (group_sizes(65536, GROUPS, distribution) for distribution in ("uniform", "zipf", "hot"))
    assert set(uniform) == {585, 586}
    exact = 65536 / np.arange(1, 113) / np.sum(1 / np.arange(1, 113))
    np.testing.assert_allclose(np.sort(zipf)[::-1], exact, atol=1)
    assert not np.array_equal(zipf, np.sort(zipf)[::-1]), "experts are shuffled"
    assert hot.max() == 32768
    assert set(hot) - {32768} == {295, 296}
    assert any(hot.argmax() != group_sizes(65536, GROUPS, "hot", seed).argmax() for seed in range(1, 4))
    with pytest.raises(ValueError, match="'even' is not one of uniform, zipf, hot"):
        group_sizes(1, 1, "even")
    with pytest.raises(ValueError, match="at least 0 rows and 1 group"):
        group_sizes(1, 0, "uniform")


def test_the_floor_at_the_models_sizes() -> None:
    w13, w2 = (Case(op, "w4a16", 16384) for op in ("w13", "w2"))
    assert w13.weight_bytes == 112 * 6144 * 3584 * 17 / 32
    assert w2.weight_bytes == 112 * 3584 * 3072 * 17 / 32
    assert results.roof_us(w13, CEILINGS) == pytest.approx(970, rel=1e-3)
    assert results.roof_us(w2, CEILINGS) == pytest.approx(485, rel=1e-3)
    assert results.roof_us(Case("w13", "w4a8_fp8", 16384), CEILINGS) == pytest.approx(499, rel=1e-3)
    assert results.roof_us(Case("w13", "w4a16", 128), CEILINGS) == pytest.approx(300, rel=2e-3)
    few = Case("w13", "w4a16", 2, distribution="uniform")
    assert few.weight_bytes == w13.weight_bytes / 56, "experts without rows are not read"
    assert few.bytes == few.weight_bytes + 2 * (3584 + 3072) * 2
    assert Case("w2", "bf16", 16384).weight_bytes == 112 * 3584 * 3072 * 2
    situ, quantize = Case("situ", "bf16", 10), Case("quantize", "w4a8_fp8", 10)
    assert situ.bytes == 10 * 3 * 3072 * 2
    assert quantize.bytes == 10 * (3 * 3584 + 4)
    gather, combine = (Case(op, "bf16", 160) for op in ("gather", "combine"))
    assert gather.bytes == 2 * 3584 * (10 + 160) + 4 * 160
    assert combine.bytes == 160 * (2 * 3584 + 8) + 4 * 10 * 3584
    assert results.roof_us(situ, CEILINGS) == situ.bytes / 3.26e6


def test_calls_are_what_runs_between_two_flushes() -> None:
    flush = timing._FLUSH_MODULE
    activities = [
        Activity("jit_earlier", 0, 50),
        Activity(flush, 100, 200),
        Activity("jit_f", 210, 1210),
        Activity("", 1300, 2210),  # a copy, or a kernel that no module claims
        Activity(flush, 3000, 3100),
        Activity("jit_f", 3200, 6200),
        Activity("jit_f", 3300, 4000),  # on another stream
    ]
    assert call_times(reversed(activities)) == [2.0, 3.0]
    for broken in ([], activities[:2], [activities[0]], activities[:-2]):
        with pytest.raises(OSError, match="does not show the timed calls; end other profilers"):
            call_times(broken)


def test_the_flush_is_found_by_its_name() -> None:
    flush: Any = timing._flush_l2()
    program = flush.lower(jnp.float32(1)).compile().as_text()
    assert program.startswith(f"HloModule {timing._FLUSH_MODULE},")


def test_a_profile_is_read(tmp_path: Path) -> None:
    profile = """
    planes { name: "/host:CPU" lines { name: "Stream #1" events { metadata_id: 1 duration_ps: 1000 } }
      event_metadata { key: 1 value { id: 1 name: "no" } } }
    planes { name: "/device:GPU:0"
      lines { name: "Stream #7(Compute)" timestamp_ns: 1000
        events { metadata_id: 1 offset_ps: 5000 duration_ps: 2000000 stats { metadata_id: 1 str_value: "jit_f" } }
        events { metadata_id: 1 offset_ps: 9000000 duration_ps: 1000 } }
      lines { name: "XLA Modules" events { metadata_id: 1 duration_ps: 1000 } }
      event_metadata { key: 1 value { id: 1 name: "kernel" } }
      stat_metadata { key: 1 value { id: 1 name: "hlo_module" } } }
    """
    file = tmp_path / "plugins" / "host.xplane.pb"
    file.parent.mkdir()
    file.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(profile))
    assert timing._activities(str(tmp_path)) == [Activity("jit_f", 1005, 3005), Activity("", 10000, 10001)]


def test_the_clock_has_a_median_and_a_limit() -> None:
    called: list[None] = []
    timed = Stopwatch(5, "wall").measure(lambda: called.append(None))
    assert timed is not None
    assert len(called) == 2 + 5, "one compiles, one decides how to time the rest"
    assert timed.us_min <= timed.us <= timed.us_max
    assert timed.timer == "wall"
    assert Stopwatch(5, "wall").measure(lambda: None, limit=0.0) is None


@pytest.mark.gpu
def test_device_times_are_within_the_clocks() -> None:
    a = jax.random.normal(jax.random.key(0), (4096, 4096), jnp.bfloat16)
    product = jax.jit(lambda a: a @ a)
    device, wall = (Stopwatch(20, timer).measure(lambda: product(a)) for timer in ("device", "wall"))
    assert device is not None
    assert wall is not None
    assert device.timer == "device"
    assert 0.2 * wall.us < device.us <= wall.us
    assert device.us < 2 * device.us_min


def test_every_op_and_recipe(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    ops, recipes = "w13,w2,situ,quantize,schedule,gather,combine", "bf16,w4a16,w4a8,w4a8_fp8"
    done = bench("--op", ops, "--recipe", recipes, "--rows", 40, *SMALL, "--json", file)
    assert done.exit_code == 0, done.output
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]
    rows = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert len(rows) == 4 + 4 + 1 + 2 + 3
    for row in rows:
        assert row.keys() >= KEYS
        assert "humming_us" not in row
        assert 0 < row["us_min"] <= row["us"] <= row["us_max"]
        assert row["roof_us"] > 0
        assert row["compile_s"] > 0
        assert row["tbs"] > 0
        assert (row["implementation"], row["timer"], row["jax"]) == ("xla", "wall", jax.__version__)
        product = row["op"] in ("w13", "w2")
        assert (row["tflops"] is not None) == (row["groups"] == 4) == (row["distribution"] == "uniform") == product
        assert row["error"] is None or row["error"] <= 3e-3
        assert (row["error"] is None) != product
        quantized = product and row["recipe"] in ("w4a8", "w4a8_fp8")
        assert (row["from_bf16_us"] is not None) == quantized
        assert (row["quantized_out_us"] is not None) == (quantized and row["op"] == "w13")
    assert "w13 + SiTU, xla: 4 experts, [rows, 64] x [192, 64]" in done.stdout
    assert "40 uniform w4a8_fp8" in done.stdout
    assert "compile s" in done.stdout
    assert "wall time, launches included" in done.stdout
    assert "…" not in done.stdout, "80 columns hold everything"


def test_another_implementation_is_compared_with_xla(tmp_path: Path) -> None:
    arguments: tuple[object, ...] = (
        "--op",
        "w2",
        "--rows",
        8,
        "--distribution",
        "zipf,hot",
        "--recipe",
        "w4a16",
        *SMALL,
    )
    arguments += ("--implementation", "reference", "--json", tmp_path / "bench.json")
    assert bench(*arguments).exit_code == 0
    rows = json.loads((tmp_path / "bench.json").read_text())
    assert [row["distribution"] for row in rows] == ["zipf", "hot"]
    assert all(row["xla_us"] > 0 and row["implementation"] == "reference" for row in rows)
    assert bench(*arguments, "--no-xla").exit_code == 0
    assert json.loads((tmp_path / "bench.json").read_text())[0]["xla_us"] is None


def test_a_wrong_result_is_not_a_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "relative_error", lambda *arguments: float("nan"))
    done = bench("--op", "w2", "--rows", 8, "--recipe", "w4a16", *SMALL, "--json", tmp_path / "bench.json")
    assert done.exit_code == 1
    assert "w2 8 uniform w4a16: the result is wrong, relative L2 nan where 0.002 is allowed" in done.stdout
    assert json.loads((tmp_path / "bench.json").read_text())[0]["error"] == "nan"


@pytest.mark.parametrize("recipe", ["bf16", "w4a16", "w4a8", "w4a8_fp8"])
def test_the_check_sees_an_error(recipe: str) -> None:
    case = Case("w13", recipe, 40, 4, "hot", 64, 96)
    experts = calls.make_experts(case)
    x = calls.quantized_rows(case, calls.make_rows(case))
    y = calls.product_call(case, x, calls.expert_weights(experts, case, "xla"), implementation="xla")()
    assert y.shape == (40, 96)
    assert calls.relative_error(case, x, experts, y) < results.ERROR_LIMITS[recipe]
    assert calls.relative_error(case, x, experts, y[::-1]) > 0.5


def test_distributions_share_a_program_but_not_their_rows() -> None:
    hot, even = (Case("w2", "w4a16", 40, 4, distribution, 64, 96) for distribution in ("hot", "uniform"))
    experts = calls.make_experts(hot)
    x = calls.make_rows(hot)
    w = calls.expert_weights(experts, hot, "xla")
    programs = [calls.product_call(case, x, w, implementation="xla") for case in (hot, even)]
    assert programs[0].executable is programs[1].executable
    for case, program in zip((hot, even), programs, strict=True):
        assert calls.relative_error(case, x, experts, program()) < results.ERROR_LIMITS["w4a16"]
    other = calls.product_call(hot, x, w, implementation="xla", out_format="f32")
    assert other().dtype == jnp.float32


def test_peers_that_are_not_there_are_named(tmp_path: Path) -> None:
    arguments = ("--op", "w2", "--rows", 8, "--recipe", "w4a16", *SMALL, "--peers")
    done = bench(*arguments, "--json", tmp_path / "bench.json")
    assert done.exit_code == 0, done.output
    notes = " ".join(done.stdout.split())
    assert "Humming is not timed: torch is not importable by" in notes
    assert "tokamax is not timed: it is not importable here" in notes
    row = json.loads((tmp_path / "bench.json").read_text())[0]
    assert {row[name] for name in ("humming_us", "humming_prequantised_us", "tokamax_us")} == {None}
    nowhere = bench(*arguments, "--peer-python", tmp_path / "nowhere")
    assert nowhere.exit_code == 0
    assert "cannot be run: No such file or directory" in " ".join(nowhere.stdout.split())


def test_peers_are_asked_for_the_same_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins: a program that answers with what it was asked, and a tokamax made of `lax.ragged_dot`."""
    program = tmp_path / "peer.py"
    program.write_text(
        "import json, sys\n"
        "asked = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "sizes = [asked[f'--{name}'] for name in ('groups', 'hidden', 'width', 'seed')]\n"
        "assert sizes == ['4', '64', '96', '5'], asked\n"
        "record = {'op': 'w13', 'rows': 8, 'distribution': 'hot'}\n"
        "assert [asked[f'--{name}'] for name in record] == ['w13', '8', 'hot'], asked\n"
        "record |= {'humming': '0.1.19', 'torch': '2.11.0'}\n"
        "assert asked['--activations'] == 'bfloat16,float8e4m3', asked\n"
        "figures = [('bfloat16', 'from bf16', 450.0), ('float8e4m3', 'from bf16', 330.0)]\n"
        "figures += [('float8e4m3', 'prequantised', 320.0)]\n"
        "records = [record | {'activations': a, 'how': h, 'us': u, 'kernel_us': u - 2} for a, h, u in figures]\n"
        "json.dump(records, open(asked['--json'], 'w'))\n"
    )
    monkeypatch.setattr(peers, "PROGRAM", program)
    (tmp_path / "tokamax.py").write_text("from jax.lax import ragged_dot\n")
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ("--op", "w13", "--rows", 8, "--distribution", "hot", *SMALL, "--seed", 5, "--peers")
    done = bench(*arguments, "--json", tmp_path / "bench.json")
    monkeypatch.delitem(sys.modules, "tokamax")
    assert done.exit_code == 0, done.output
    rows = {row["recipe"]: row for row in json.loads((tmp_path / "bench.json").read_text())}
    assert (rows["w4a16"]["humming_us"], rows["w4a16"]["humming_prequantised_us"]) == (450.0, None)
    assert (rows["w4a8_fp8"]["humming_us"], rows["w4a8_fp8"]["humming_prequantised_us"]) == (330.0, 320.0)
    assert rows["w4a8_fp8"]["humming_prequantised_kernel_us"] == 318.0
    assert rows["w4a8"]["humming_us"] is None
    assert all(row["tokamax_us"] > 0 for row in rows.values())
    assert "not timed" not in done.stdout
    assert "Humming 0.1.19 with torch 2.11.0" in done.stdout


@pytest.mark.parametrize(
    ("program", "options"),
    [
        (peers.PROGRAM, ("--op", "--rows", "--distribution")),
        (peers.LAYER_PROGRAM, ("--tokens", "--picks")),
    ],
    ids=["products", "layer"],
)
def test_the_peers_programs_need_no_jax(program: Path, options: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "jax.py").write_text("raise RuntimeError('imported')\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(program), "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for option in (*options, "--activations", "--groups", "--hidden", "--width", "--seed", "--json"):
        assert option in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "w14"), "op 'w14' is not one of w13, w2, situ, quantize, schedule, gather, combine, layer"),
        (("--recipe", "w4a4"), "recipe 'w4a4' is not one of bf16, w4a16, w4a8, w4a8_fp8"),
        (("--op", "quantize", "--recipe", "bf16"), "op quantize has the recipes w4a8, w4a8_fp8, not bf16"),
        (("--distribution", "even"), "distribution 'even' is not one of uniform, zipf, hot"),
        (("--rows", "1e3"), "--rows '1e3' must be whole numbers such as 128,2048"),
        (("--rows", "0"), "rows=0 must be at least 1"),
        (("--op", "gather", "--rows", "40"), "rows=(40,) must be multiples of picks=16"),
        (("--groups", "0"), "groups=0 must be at least 1"),
        (("--repeats", "0"), "repeats=0 must be at least 1"),
        (("--hidden", "48"), "hidden=48 must be a multiple of 32"),
        (("--implementation", "fastest"), "'fastest' is not one of"),
        (("--op", "situ", "--implementation", "mosaic"), "it is written for compute capability 9.0 or 10.0"),
        (("--json", "nowhere/b.json"), "nowhere is not a folder"),
    ],
)
def test_a_mistake_is_one_message_and_status_2(arguments: tuple[str, ...], message: str) -> None:
    done = bench(*arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stdout == ""


def test_device_times_need_a_gpu() -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("there is one")
    done = bench("--op", "situ", "--rows", "8", *SMALL, "--timer", "device")
    assert done.exit_code == 2
    assert "timer='device' needs a GPU, and JAX runs on cpu: use --timer wall" in done.stderr


def test_options_reach_the_plan() -> None:
    request: dict[str, Any] = {"ops": ("w2",), "recipes": ("w4a16",), "rows": (1, 2), "distributions": ("zipf", "hot")}
    planned = run.plan(run.Request(**request, groups=896, seed=7))
    cases = [case for case in planned if isinstance(case, Case)]
    assert [(case.distribution, case.rows) for case in cases] == [("zipf", 1), ("zipf", 2), ("hot", 1), ("hot", 2)]
    assert {(case.groups, case.seed, case.hidden, case.width) for case in cases} == {(896, 7, 3584, 3072)}
    defaults = run.plan(run.Request())
    assert [(case.op, case.recipe) for case in defaults[::4]] == [
        (op, recipe) for op in ("w13", "w2") for recipe in ("w4a16", "w4a8", "w4a8_fp8")
    ]
    assert [case.rows for case in defaults[:4]] == [128, 2048, 16384, 65536]


def test_results_are_kept_as_they_come() -> None:
    """A run that is cut short must not lose what it has measured."""
    request = run.Request(ops=("situ",), rows=(8, 16), hidden=64, width=64, repeats=1, timer="wall")
    kept: list[int] = []
    result = run.run(request, run.plan(request), keep=lambda so_far: kept.append(len(so_far.results)))
    assert kept == [1, 2]
    assert len(result.results) == 2


def test_the_script_for_a_profiler_calls_each_product_once(capsys: pytest.CaptureFixture[str]) -> None:
    call_products = runpy.run_path(str(Path(__file__).parent.parent / "scripts" / "call_products.py"))["call_products"]
    call_products(op="w2", recipe="w4a16", rows="1,3", groups=1, implementation="xla")
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["w2 w4a16 1 rows", "w2 w4a16 3 rows"]
