"""`k3jax bench` of a layer's dense products: floors by hand at the release's sizes, and runs at small ones."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from k3jax.bench import calls, dense_calls, run
from k3jax.bench.dense_cases import DENSE_OPS, GATED, DenseCase
from k3jax.bench.results import ERROR_LIMITS, roof_us
from k3jax.cli import app

pytestmark = pytest.mark.usefixtures("quickly_compiled", "ceilings")
SIZES: dict[str, Any] = {"model": 64, "hidden": 64, "width": 32, "shared": 1, "intermediate": 32}
WEIGHT = (64, 64)  # at SIZES, of all products that run here: the same shapes are compiled once
CEILINGS = {"read": 4e12, "bf16": 800e12}


@pytest.fixture
def ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is measured at once; it has no others than dense products need."""
    monkeypatch.setattr(run, "measure_ceiling", lambda name, stopwatch: CEILINGS[name])


def bench(*arguments: object) -> Result:
    sizes = [f"--{name}={size}" for name, size in SIZES.items()]
    return CliRunner().invoke(app, ["bench", *sizes, "--repeats=1", *(str(argument) for argument in arguments)])


@pytest.mark.parametrize(
    ("op", "weight_bytes", "row_bytes", "row_flop"),
    [
        ("latent_down", 51_380_224, 21_504, 51_380_224),
        ("latent_up", 51_380_224, 21_504, 51_380_224),
        ("shared_gate_up", 176_160_768, 26_624, 176_160_768),
        ("shared_down", 88_080_384, 26_624, 88_080_384),
        ("mlp_gate_up", 968_884_224, 81_920, 968_884_224),
        ("mlp_down", 484_442_112, 81_920, 484_442_112),
    ],
)
def test_the_floor_at_the_models_sizes(op: str, weight_bytes: int, row_bytes: int, row_flop: int) -> None:
    few, many = DenseCase(op, 8), DenseCase(op, 8192)
    assert few.weight_bytes == many.weight_bytes == weight_bytes
    assert (few.bytes, many.bytes) == (weight_bytes + 8 * row_bytes, weight_bytes + 8192 * row_bytes)
    assert (few.flop, many.flop) == (8 * row_flop, 8192 * row_flop)
    assert roof_us(few, CEILINGS) == pytest.approx((weight_bytes + 8 * row_bytes) / 4e6)
    assert roof_us(many, CEILINGS) == pytest.approx(8192 * row_flop / 800e6)


def test_the_plan_has_the_options_sizes() -> None:
    sizes: dict[str, Any] = {"model": 100, "hidden": 32, "width": 64, "shared": 3, "intermediate": 80}
    planned = run.plan(run.Request(ops=DENSE_OPS, rows=(8, 64), seed=3, **sizes))
    assert planned == tuple(DenseCase(op, rows, **sizes, seed=3) for op in DENSE_OPS for rows in (8, 64))
    assert {case.op: case.weight for case in planned if isinstance(case, DenseCase)} == {
        "latent_down": (32, 100),
        "latent_up": (100, 32),
        "shared_gate_up": (384, 100),
        "shared_down": (100, 192),
        "mlp_gate_up": (160, 100),
        "mlp_down": (100, 80),
    }
    both = run.plan(run.Request(ops=("w13", "mlp_down"), recipes=("w4a16", "bf16"), rows=(8,)))
    assert [(case.op, case.recipe) for case in both] == [("w13", "w4a16"), ("w13", "bf16"), ("mlp_down", "bf16")]


def test_products_with_and_without_situ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    make_weight = dense_calls.make_weight

    def alive() -> int:
        return sum(array.shape == WEIGHT for array in jax.live_arrays())

    others = alive()  # of other tests

    def counted(case: DenseCase) -> jax.Array:
        made.append(case.op)
        assert alive() <= others, "the last op's is still there"
        return make_weight(case)

    monkeypatch.setattr(dense_calls, "make_weight", counted)
    file, ops = tmp_path / "bench.json", ("latent_up", "mlp_gate_up")
    done = bench("--op", ",".join(ops), "--rows", "8,200", "--json", file)
    assert done.exit_code == 0, done.output
    assert tuple(made) == ops, "once for all numbers of rows"
    rows = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert [(row["op"], row["rows"]) for row in rows] == [(op, count) for op in ops for count in (8, 200)]
    for row in rows:
        assert {name: row[name] for name in SIZES} == SIZES
        assert (row["implementation"], row["recipe"], row["timer"]) == ("xla", "bf16", "wall")
        assert {row[name] for name in ("groups", "distribution", "experts_hit", "from_bf16_us", "xla_us")} == {None}
        assert row["ceilings"] == CEILINGS
        assert 0 < row["us_min"] <= row["us"] <= row["us_max"]
        assert row["tbs"] == pytest.approx(2e-6 * 64 * 64 / row["us"])
        assert row["tflops"] == pytest.approx(row["rows"] * 2e-6 * 64 * 64 / row["us"])
        assert row["roof_us"] == roof_us(DenseCase(row["op"], row["rows"], **SIZES), CEILINGS)
        assert row["dot_us"] > 0
        assert row["compile_s"] > 0
        assert row["error"] <= 2e-3
    assert "mlp_gate_up + SiTU, xla: [rows, 64] x [64, 64]" in done.stdout
    assert "latent_up, xla: [rows, 64] x [64, 64]" in done.stdout
    assert "jnp.dot" in done.stdout
    assert "…" not in done.stdout, "80 columns hold everything"


def test_another_implementation_is_compared_with_xla_and_a_bare_product(tmp_path: Path) -> None:
    arguments = ("--op", "latent_up", "--rows", 8, "--implementation", "reference", "--json", tmp_path / "bench.json")
    assert bench(*arguments, "--peers").exit_code == 0
    (row,) = json.loads((tmp_path / "bench.json").read_text())
    assert row["implementation"] == "reference"
    assert min(row["xla_us"], row["dot_us"]) > 0
    assert {row["humming_us"], row["humming_kernel_us"], row["tokamax_us"]} == {None}


@pytest.mark.parametrize("op", ["shared_gate_up", "latent_down"])
def test_the_check_sees_an_error(op: str) -> None:
    case = DenseCase(op, 200, **SIZES)
    x, w = calls.make_rows(case), dense_calls.make_weight(case)
    assert np.asarray(w, np.float32).var() == pytest.approx(1 / 64, rel=0.1)
    y = dense_calls.dense_call(case, x, w, "xla")()
    assert y.shape == (200, 32 if op in GATED else 64)
    assert dense_calls.relative_error(case, x, w, y) < ERROR_LIMITS["bf16"]
    assert dense_calls.relative_error(case, x, w, y[::-1]) > 0.5
    assert dense_calls.dot_call(x, w)().shape == (200, 64), "gate and up, without SiTU"
    for row in (0, 199):
        assert dense_calls.relative_error(case, x, w, y.at[row].set(0)) > 0.02, "both ends are looked at"


def test_a_wrong_product_is_not_a_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*operands: Any, **options: Any) -> jax.Array:
        return 2 * dense_matmul(*operands, **options)

    dense_matmul = dense_calls.dense_matmul
    monkeypatch.setattr(dense_calls, "dense_matmul", wrong)
    arguments = ("--op", "shared_gate_up", "--rows", 8, "--implementation", "reference", "--no-xla")
    done = bench(*arguments, "--json", tmp_path / "bench.json")
    assert done.exit_code == 1
    assert "shared_gate_up 8 bf16: the result is wrong, relative L2 1.0e+00 where 0.002 is allowed" in done.stdout
    (row,) = json.loads((tmp_path / "bench.json").read_text())
    assert row["error"] == pytest.approx(1)
    assert (row["xla_us"], row["dot_us"]) == (None, None), "with --no-xla"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--recipe", "w4a16"), "op mlp_down has the recipes bf16, not w4a16"),
        (("--distribution", "zipf"), "--distribution is for w13 and w2, not for mlp_down"),
        (("--op", "shared_down", "--shared", "0"), "shared=0 must be at least 1"),
        (("--intermediate", "0"), "intermediate=0 must be at least 1"),
        (("--implementation", "triton"), "dense_matmul cannot run on implementation 'triton'"),
        (("--implementation", "mosaic"), "it is written for compute capability 9.0"),
    ],
)
def test_a_mistake_is_one_message_and_status_2(arguments: tuple[str, ...], message: str) -> None:
    done = bench("--op", "mlp_down", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stdout == ""
