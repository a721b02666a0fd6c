"""Others' kernels on the inputs of `k3jax bench`: Humming in a process of its own, tokamax in this one."""

import dataclasses
import functools
import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from k3jax.bench import calls
from k3jax.bench.cases import GEMMS, Case
from k3jax.bench.dense_cases import DenseCase
from k3jax.bench.layer_cases import LayerCase
from k3jax.bench.timing import Stopwatch

SCRIPTS = Path(__file__).parents[2] / "scripts"
PROGRAM = SCRIPTS / "peer_humming.py"
LAYER_PROGRAM = SCRIPTS / "peer_humming_layer.py"
ACTIVATIONS = {"w4a16": "bfloat16", "w4a8_fp8": "float8e4m3"}
"""The recipes that Humming has, and what it calls their activations."""

TOKAMAX_LIMIT = 3.0  # seconds of one call


class Peers:
    """What others need for the products and the routed paths among `cases`.

    `notes` say what could not be timed, and why.
    """

    def __init__(self, cases: Sequence[Case | DenseCase | LayerCase]) -> None:
        self.products = tuple(case for case in cases if isinstance(case, Case) and case.op in GEMMS)
        self.layers = tuple(case for case in cases if isinstance(case, LayerCase))
        self.notes: list[str] = []
        self._humming: dict[tuple[Any, ...], dict[str, float | None]] = {}
        self._humming_routed: list[dict[str, Any]] = []
        self._tokamax: dict[tuple[str, int, str | None], float | None] = {}

    def figures(self, case: Case | DenseCase) -> dict[str, float | None]:
        """Microseconds beside a case: None for what was not timed.

        Humming's bare product, by CUDA events and from its first kernel to its last one's end, of bfloat16 rows and
        (`prequantised`) of e4m3 rows with one scale a token; tokamax's product of bfloat16 rows and experts.
        """
        found: dict[str, float | None] = {}
        for how, name in (("from bf16", "humming"), ("prequantised", "humming_prequantised")):
            key = (case.op, case.rows, case.distribution, ACTIVATIONS.get(case.recipe), how)
            record = self._humming.get(key, {})
            found |= {f"{name}_us": record.get("us"), f"{name}_kernel_us": record.get("kernel_us")}
        return found | {"tokamax_us": self._tokamax.get((case.op, case.rows, case.distribution))}

    def layer_figures(self, case: LayerCase) -> dict[str, Any]:
        """Microseconds of the routed path out of Humming's kernels, in the faster of its layouts; None where not timed.

        By CUDA events, and from the first kernel to the last one's end, as ours is timed; and which layout that is.
        """
        asked = (case.tokens, ACTIVATIONS.get(case.recipe))
        found = [record for record in self._humming_routed if (record["tokens"], record["activations"]) == asked]
        fastest: dict[str, Any] = min(found, key=lambda record: record["us"], default={})
        return {f"humming_routed_{name}": fastest.get(name) for name in ("us", "kernel_us", "layout")}

    def time_humming(self, python: Path | None) -> None:
        """Runs the programs that time Humming by `python`, which has torch and humming; None for this interpreter."""
        products = [case for case in self.products if case.recipe in ACTIVATIONS]
        fields = ("op", "rows", "distribution", "activations", "how")
        for record in self._ask(PROGRAM, python, _arguments(products)) if products else []:
            self._humming[tuple(record[field] for field in fields)] = record
        layers = [case for case in self.layers if case.recipe in ACTIVATIONS]
        if layers:
            self._humming_routed = self._ask(LAYER_PROGRAM, python, _layer_arguments(layers))

    def _ask(self, program: Path, python: Path | None, arguments: list[str]) -> list[dict[str, Any]]:
        """A program's records; none, and a note, where it could not time anything."""
        if not program.is_file():
            self.notes.append(f"Humming is not timed: {program} is part of the repository only")
            return []
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "humming.json"
            command = [str(python or sys.executable), str(program), *arguments, "--json", str(file)]
            try:
                done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
            except OSError as error:
                self.notes.append(f"Humming is not timed: {python} cannot be run: {error.strerror}")
                return []
            if done.returncode != 0:
                reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
                self.notes.append(f"Humming is not timed: {reason}")
                return []
            records = json.loads(file.read_text(encoding="utf-8"))
        self.notes.append(f"Humming {records[0]['humming']} with torch {records[0]['torch']}, just before, on this GPU")
        return records

    def time_tokamax(self, stopwatch: Stopwatch) -> None:
        """Times tokamax's `ragged_dot` once for each op, rows and distribution, whatever the recipe."""
        if not self.products:
            return
        if importlib.util.find_spec("tokamax") is None:
            self.notes.append("tokamax is not timed: it is not importable here")
            return
        ragged_dot = importlib.import_module("tokamax").ragged_dot
        for op in dict.fromkeys(case.op for case in self.products):
            same = {(case.op, case.rows, case.distribution): case for case in self.products if case.op == op}
            try:
                self._tokamax |= _ragged_dot_times(ragged_dot, same, stopwatch)
            except (NotImplementedError, ValueError, RuntimeError) as error:
                self.notes.append(f"tokamax is not timed for {op}: {str(error).splitlines()[0]}")


def _ragged_dot_times(
    ragged_dot: Any, cases: dict[tuple[str, int, str | None], Case], stopwatch: Stopwatch
) -> dict[tuple[str, int, str | None], float | None]:
    """Microseconds of cases that share their experts."""
    first = dataclasses.replace(next(iter(cases.values())), recipe="bf16")
    experts = calls.expert_weights(calls.make_experts(first), first, "xla")
    experts = jax.jit(lambda w: jnp.swapaxes(w, 1, 2))(experts)  # it wants [G, K, N]
    product = jax.jit(lambda x, w, sizes: ragged_dot(x, w, sizes, preferred_element_type=jnp.bfloat16))
    found = {}
    for key, case in cases.items():
        x, sizes = calls.make_rows(case), jnp.asarray(case.group_sizes)
        timing = stopwatch.measure(functools.partial(product, x, experts, sizes), limit=TOKAMAX_LIMIT)
        found[key] = None if timing is None else timing.us
    return found


def _arguments(cases: list[Case]) -> list[str]:
    """The products' program's options for all of the cases."""
    lists: dict[str, list[Any]] = {
        "--op": [case.op for case in cases],
        "--rows": [case.rows for case in cases],
        "--distribution": [case.distribution for case in cases],
    }
    return _options(lists, cases, ("groups", "hidden", "width", "seed"))


def _layer_arguments(cases: list[LayerCase]) -> list[str]:
    """The routed path's program's options for all of the cases."""
    lists: dict[str, list[Any]] = {"--tokens": [case.tokens for case in cases]}
    return _options(lists, cases, ("groups", "picks", "hidden", "width", "seed"))


def _options(lists: dict[str, list[Any]], cases: Sequence[Case | LayerCase], numbers: tuple[str, ...]) -> list[str]:
    """Of the lists, what they hold once each; of the numbers, what all cases share."""
    lists = lists | {"--activations": [ACTIVATIONS[case.recipe] for case in cases]}
    options = [part for name, values in lists.items() for part in (name, ",".join(map(str, dict.fromkeys(values))))]
    return options + [part for name in numbers for part in (f"--{name}", str(getattr(cases[0], name)))]
