"""Whole runs of healing: that it helps, resumes, stops, reads captures, runs over a mesh, and exports what loads."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from numerics import assert_same_bits, relative_l2
from safetensors.numpy import save_file

from k3jax import LoadOptions, MoE, load_layer
from k3jax.checkpoint.synthetic import synthetic_config, write_checkpoint
from k3jax.compare import run as compare
from k3jax.healing import memory, run, training
from k3jax.healing.divergence import TIMES, WINDOW, divergence
from k3jax.healing.optimizer import Schedule
from k3jax.healing.pairs import Pairs, from_teacher
from k3jax.healing.tokens import structured_tokens
from k3jax.healing.training import Plan
from k3jax.merging import merge_adapters
from k3jax.saving import load_adapters
from sharding import MeshSizes

SCRIPT = Path(__file__).parents[1] / "scripts" / "heal.py"
STEPS, RATE, BATCH, SAVE_EVERY, KEEP, TOKENS = 100, 1e-2, 128, 10, 8, 8192
OPTIONS: dict[str, object] = {
    "--steps": STEPS,
    "--learning-rate": RATE,
    "--batch": BATCH,
    "--save-every": SAVE_EVERY,
    "--keep": KEEP,
    "--tokens": TOKENS,
    "--by": "load",
}


@pytest.fixture(scope="module", autouse=True)
def compiled_once(quickly_compiled: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Keeps what is compiled for a child of this process: the environment for it."""
    settings = {  # name -> value here, JAX's own default
        "jax_compilation_cache_dir": (str(tmp_path_factory.mktemp("compiled")), None),
        "jax_persistent_cache_min_compile_time_secs": (0, 1),
    }
    for which in (0, 1):
        compilation_cache.reset_cache()
        for name, values in settings.items():
            jax.config.update(name, values[which])
        if which == 0:
            kept = {name.upper(): str(values[0]) for name, values in settings.items()}
            yield kept | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 64, "latent_size": 64, "expert_width": 96}
    config = synthetic_config(**sizes, num_experts=16, top_k=4, layers=2)
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model", config)


@pytest.fixture(scope="module")
def request_(checkpoint: Path) -> run.Request:
    plan = Plan(Schedule(STEPS, learning_rate=RATE), batch=BATCH, save_every=SAVE_EVERY)
    return run.Request(checkpoint=checkpoint, plan=plan, keep=KEEP, tokens=TOKENS, by="load")


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.fixture(scope="module")
def held() -> dict[int, int]:
    """Bytes that were alive at each step of `uninterrupted`, beside those of before it."""
    return {}


@pytest.fixture(scope="module")
def uninterrupted(request_: run.Request, held: dict[int, int]) -> run.Result:
    before = live_bytes()
    return run.heal(request_, lambda done, *_: held.update({done: live_bytes() - before}), lambda _: None)


def heal_script(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs `scripts/heal.py` in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", ["heal.py", *(str(part) for option in options.items() for part in option)])
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def assert_same_layers(actual: Any, expected: Any) -> None:
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_same_bits(ours, theirs)


def test_healing_halves_the_error_of_cutting_half_of_the_experts(uninterrupted: run.Result) -> None:
    result = uninterrupted
    assert result.uncut["output"] == 0
    assert result.before["output"] > 0.2
    assert result.after["output"] < result.before["output"] / 2, (result.before, result.after)
    assert len(result.kept or ()) == KEEP
    assert len(result.healed.history) == result.healed.step == STEPS
    assert run.failure(result) is None


def test_a_run_holds_what_is_stated_and_no_second_copy(uninterrupted: run.Result, held: dict[int, int]) -> None:
    """Bytes alive at every step: masters and moments, the frozen rest, what training began with; no teacher."""
    parameters = uninterrupted.trained_bytes // memory.BYTES_A_PARAMETER
    batch = BATCH * (2 * 128 + 64) * 2
    stated = uninterrupted.frozen_bytes + (12 + 2) * parameters + batch
    assert set(held) == set(range(1, STEPS + 1))
    assert max(held.values()) <= stated + 10_000, (max(held.values()), stated)  # scalars, and what JAX keeps of its own
    assert uninterrupted.cut_bytes is not None
    assert uninterrupted.cut_bytes > 3 * uninterrupted.frozen_bytes


def test_a_killed_run_resumes_to_the_bit(
    request_: run.Request, uninterrupted: run.Result, compiled_once: dict[str, str], tmp_path: Path
) -> None:
    states = tmp_path / "states"
    options = OPTIONS | {"--checkpoint": request_.checkpoint, "--states": states}
    command = [sys.executable, str(SCRIPT), *(str(part) for option in options.items() for part in option)]
    environment = os.environ | compiled_once | {"JAX_NUM_CPU_DEVICES": str(jax.device_count())}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        while process.poll() is None and not (states / "20").exists():
            time.sleep(0.01)
    finally:
        process.kill()
        printed = process.communicate()[0]
    assert process.returncode == -signal.SIGKILL, printed
    assert not (states / str(STEPS)).exists()
    steps: list[int] = []
    resumed = run.heal(replace(request_, states=states), lambda done, *_: steps.append(done), lambda _: None)
    assert 20 < steps[0] < STEPS
    assert resumed.healed.history == uninterrupted.healed.history
    assert_same_layers(resumed.healed.layer, uninterrupted.healed.layer)
    other = replace(request_, states=states, plan=replace(request_.plan, seed=1))
    with pytest.raises(ValueError, match=r"holds another run's states .*seed=1, there 0.*; name another folder"):
        run.heal(other, lambda *_: None, lambda _: None)


# ---- a capture, a mesh, quantised weights


def test_a_capture_heals_as_the_layer_that_it_is_of(
    uninterrupted: run.Result,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its training tokens are the layer's own, its held-out ones are a twentieth off: the same layer, other errors."""
    pairs = from_teacher(load_layer(checkpoint, 1), structured_tokens(TOKENS, 128, seed=0))
    assert pairs.normed_latent is not None
    output = pairs.output.copy()
    output[-TOKENS // 8 :] *= output.dtype.type(1.0625)
    tensors = {"input": pairs.x, "output": output, "normed_latent": pairs.normed_latent}
    facts = {"format": "k3jax-capture-1", "engine": "some engine", "recipe": "w4a16", "rounding_order": "engine"}
    capture, out, log = (tmp_path / name for name in ("capture.safetensors", "healed", "log.json"))
    save_file({f"layers.1.{stage}": np.ascontiguousarray(array) for stage, array in tensors.items()}, capture, facts)
    options = OPTIONS | {"--checkpoint": checkpoint, "--teacher": capture, "--states": tmp_path / "states"}
    options |= {"--save-every": STEPS, "--out": out, "--json": log, "--plot": tmp_path / "plot.svg"}
    assert heal_script(options, monkeypatch) == 0
    printed = capsys.readouterr().out
    assert (
        "8 of 16 experts kept by load; teacher: capture.safetensors, from which the whole layer differs by 0.0588"
        in (printed)
    )
    assert "saved: " in printed
    assert_same_layers(load_layer(out, 1), uninterrupted.healed.layer)
    assert "polyline" in (tmp_path / "plot.svg").read_text()
    assert heal_script(options | {"--out": tmp_path / "again"}, monkeypatch) == 0, "a run that is done needs no step"
    assert_same_layers(load_layer(tmp_path / "again", 1), uninterrupted.healed.layer)


class Stopped(Exception):
    """By who asked for the run."""


def test_a_run_over_a_mesh_is_that_of_one_device_also_after_a_resume(
    request_: run.Request, uninterrupted: run.Result, tmp_path: Path
) -> None:
    saved = replace(request_.plan, save_every=2)
    request = replace(request_, plan=saved, states=tmp_path, mesh=MeshSizes(expert=2), layout="sharded")
    seen: list[str] = []

    def until(last: int) -> Any:
        def progress(done: int, steps: int, what: str) -> None:
            seen.append(f"{done} {what.split(',')[0].split()[-1]}")
            if done == last:
                raise Stopped

        return progress

    for last in (3, 5):
        with pytest.raises(Stopped):
            run.heal(request, until(last), lambda _: None)
    steps, errors = np.array([line.split() for line in seen], float).T
    assert steps.tolist() == [1, 2, 3, 3, 4, 5]
    history = uninterrupted.healed.history
    assert errors == pytest.approx([history[int(step) - 1]["output"] ** 0.5 for step in steps], rel=5e-3)
    assert (tmp_path / "4").exists()


def test_a_student_in_e4m3_with_adapters_is_healed_merged_and_compared(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The saved layer has the checkpoint's own dense weights, trained router and norm, and merged experts."""
    out, apart, log = (tmp_path / name for name in ("healed", "adapters.safetensors", "log.json"))
    options = OPTIONS | {"--checkpoint": checkpoint, "--dense-weights": "fp8", "--adapter-rank": 2}
    options |= {"--steps": 8, "--learning-rate": 3e-3, "--warmup": 2, "--out": out, "--json": log}
    assert heal_script(options, monkeypatch) == 0
    assert "merged: relative L2 error of rounding merged experts: w13 " in capsys.readouterr().out
    healed, whole = load_layer(out, 1), load_layer(checkpoint, 1)
    assert isinstance(healed, MoE)
    assert isinstance(whole, MoE)
    assert_same_layers(
        (healed.latent_down, healed.latent_up, healed.shared), (whole.latent_down, whole.latent_up, whole.shared)
    )
    kept = np.array(json.loads(log.read_text())["kept"])
    assert 1e-3 < relative_l2(healed.router.weight, np.asarray(whole.router.weight[...])[kept]) < 0.5
    found = compare.run(
        compare.plan(compare.Request(checkpoint=out, layers="1", recipes=("w4a16",), tokens=4)), lambda *_: None
    )
    assert found.ok
    plain = tmp_path / "plain"
    assert heal_script(options | {"--out": plain, "--adapters": apart}, monkeypatch) == 0
    again = load_layer(plain, 1)
    assert isinstance(again, MoE)
    assert_same_bits(again.w2.get_value().codes, whole.w2.get_value().codes[kept])
    load_adapters(again, apart)
    merge_adapters(again)
    assert_same_layers(again, healed)


def test_a_layer_of_which_nothing_trains_is_refused(checkpoint: Path) -> None:
    layer = load_layer(checkpoint, 0, options=LoadOptions(dense_weights="fp8"))
    x = structured_tokens(8, 128, seed=0)
    with pytest.raises(ValueError, match="nothing of this layer trains: its dense weights are in e4m3"):
        training.train(layer, Pairs(x, x, None), Plan(Schedule(2, warmup=0), batch=8))


# ---- divergence


def test_divergence_is_a_number_that_is_none_or_a_loss_that_stays_above_the_first() -> None:
    steady = [{"loss": 1.0, "gradient_norm": 3.0}] * 3
    assert divergence(steady) is None
    assert divergence([*steady, {"loss": 1.0, "gradient_norm": float("inf")}]) == "step 4 has a gradient_norm of inf"
    rough = [{"loss": 1.0}, *[{"loss": 50.0}] * (WINDOW - 1)]
    assert divergence(rough) is None, "not before there is a window after the first step"
    assert f"steps 2 to {WINDOW + 1} is 50, that of step 1 1" in str(divergence([*rough, {"loss": 50.0}]))
    assert divergence([{"loss": 1.0}, *[{"loss": TIMES}] * 40]) is None
    assert divergence([{"loss": 1.0}, *[{"loss": 9.0}] * 10, *[{"loss": 0.5}] * WINDOW]) is None


@pytest.mark.parametrize("with_states", [True, False])
def test_a_run_that_diverges_says_so_and_keeps_its_best_state(
    with_states: bool,
    request_: run.Request,
    uninterrupted: run.Result,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The step is one that heals a little in steps 11 to 20, less in the others, and ends in NaN at step 38."""
    made = training._compiled_step

    def scripted(*what: Any) -> Any:
        step = made(*what)

        def run_step(state: Any, frozen: Any, batch: Any) -> Any:
            state, numbers = step(state, frozen, batch)
            at = int(state.step)
            loss = float("nan") if at == 38 else 0.1 if 10 < at <= 20 else 0.2
            return state, numbers | {"loss": jnp.float32(loss)}

        return run_step

    monkeypatch.setattr(training, "_compiled_step", scripted)
    states, out = tmp_path / "states", tmp_path / "healed"
    options = OPTIONS | {"--checkpoint": request_.checkpoint, "--out": out}
    assert heal_script(options | ({"--states": states} if with_states else {}), monkeypatch) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "training diverged: step 38 has a loss of nan" in error
    assert "try a learning rate below 0.01" in error
    if not with_states:
        assert "its result is the state after step 0" in error
        assert error.endswith("; nothing was saved")
        assert not out.exists()
        return
    assert "its result is the state after step 20" in error
    assert sorted(path.name for path in states.iterdir()) == ["20", "30"]
    saved = load_layer(out, 1)
    assert isinstance(saved, MoE)
    kept = uninterrupted.healed.layer
    assert_same_bits(saved.w2.get_value().codes, kept.w2.get_value().codes)
    assert np.any(np.asarray(saved.router.weight[...]) != np.asarray(kept.router.weight[...]))
