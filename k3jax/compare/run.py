"""One run of `k3jax compare`: which layers, recipes and tokens; each recipe's layer loaded, compared and let go."""

import dataclasses
import gc
import importlib.metadata
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from k3jax.checkpoint import Checkpoint
from k3jax.checkpoint.tensor_table import EXPERTS
from k3jax.compare.capture import Capture
from k3jax.compare.layer import Array, LayerComparison, compare_layer
from k3jax.compare.tolerances import Against
from k3jax.experts import RECIPES
from k3jax.loading import load_layer
from k3jax.options import LoadOptions
from k3jax.outputs import jsonable
from pallas_kernels import select
from sharding import MeshSizes, layout_rules, make_mesh

DEFAULT_RECIPES = ("bf16", "w4a16", "w4a8")
DEFAULT_TOKENS = 128
FORMAT = "k3jax-compare-1"

Progress = Callable[[int, int, str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What to compare; None leaves the choice to `plan`.

    Attributes:
        against: "oracle", "exact", or the path of a capture.
        tokens: how many; of a capture, at most the ones it has (None: all).
        mesh: what the layers run over; None for one device. layout: of the tokens on it, "replicated" or "sharded".
        transport: of sharded tokens, "all_gather" or "per_rank".
    """

    checkpoint: Path
    layers: str | None = None
    recipes: tuple[str, ...] | None = None
    tokens: int | None = None
    seed: int = 0
    implementation: str | None = None
    against: str = "oracle"
    quantize_plain: bool = False
    dense_weights: str = "bf16"
    mesh: MeshSizes | None = None
    layout: str = "replicated"
    transport: str | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """A request against an opened checkpoint, with every choice made."""

    request: Request
    checkpoint: Checkpoint
    layers: tuple[int, ...]
    recipes: tuple[str, ...]
    capture: Capture | None
    against: Against
    mesh: jax.sharding.Mesh | None = None

    @property
    def input_description(self) -> str:
        """What the layers are fed, in words."""
        if self.capture is not None:
            return f"the input of the capture {self.capture.path} ({self.capture.engine})"
        return f"{self.request.tokens or DEFAULT_TOKENS} tokens of unit-normal bfloat16, seed {self.request.seed}"


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything a report says."""

    checkpoint: Path
    input: str
    against: Against
    truth: str
    environment: dict[str, str]
    results: tuple[LayerComparison, ...]
    seconds: float
    mesh: str = ""

    @property
    def ok(self) -> bool:
        """Whether all stages of all layers agree."""
        return all(result.ok for result in self.results)

    @property
    def verdict(self) -> str:
        """One sentence, or one for each result that diverges."""
        failed = [result for result in self.results if not result.ok]
        if not failed:
            return f"All stages agree with {self.truth}."
        return "\n".join(verdict_of(result) for result in failed)


def verdict_of(result: LayerComparison) -> str:
    """`Layer 1, w4a8: first divergence at stage experts (...)`, for a result that diverges."""
    first = result.first_divergence
    assert first is not None
    which = f"Layer {result.layer}" if result.kind == "dense" else f"Layer {result.layer}, {result.recipe}"
    text = f"{which}: first divergence at stage {first.stage} ({first.reasons[0]})."
    probe = result.stage("activation")
    if first.stage != "activation" and probe is not None and not probe.ok:
        text += " The activation probe fails as well: look there first."
    return text


def plan(request: Request) -> Plan:
    """Opens what the request names and makes its choices; raises before any work.

    Raises:
        FileNotFoundError, ValueError, NotImplementedError: something named is missing, malformed or impossible.
    """
    select.explain("grouped_matmul", implementation=request.implementation)
    checkpoint = Checkpoint.open(request.checkpoint)
    if request.tokens is not None and request.tokens < 1:
        raise ValueError(f"--tokens {request.tokens}: at least one token is needed")
    capture = None if request.against in ("oracle", "exact") else _open_capture(request, checkpoint)
    against: Against = "exact" if request.against == "exact" else "oracle"
    if capture is not None:
        against = capture.rounding_order
    layers = _layers(request, checkpoint, capture)
    recipes = _recipes(request, checkpoint, layers, capture)
    mesh = None if request.mesh is None else make_mesh(**dataclasses.asdict(request.mesh))
    layout_rules(request.layout)
    if mesh is None and request.layout == "sharded":
        raise ValueError("--tokens-layout sharded needs a mesh, such as --mesh expert=8")
    if request.transport is not None and request.layout != "sharded":
        raise ValueError(f"--transport {request.transport} is for --tokens-layout sharded: other tokens do not travel")
    return Plan(request, checkpoint, layers, recipes, capture, against, mesh)


def run(plan: Plan, progress: Progress = lambda done, total, what: None) -> Run:
    """Compares every layer under every recipe. One layer is in memory at a time.

    A dense layer has no experts for a recipe to change, so it is computed once and its result stands for all recipes.
    """
    start = time.perf_counter()
    config = plan.checkpoint.config
    jobs = [(layer, recipe) for layer in plan.layers for recipe in plan.recipes[: None if config.is_moe(layer) else 1]]
    results = []
    for done, (layer, recipe) in enumerate(jobs):
        progress(done, len(jobs), f"layer {layer}, {recipe}")
        result = _compare(plan, layer, recipe)
        names = (recipe,) if config.is_moe(layer) else plan.recipes
        results += [dataclasses.replace(result, recipe=name) for name in names]
        gc.collect()  # Modules refer to themselves: without this, two layers would be in memory at once.
    progress(len(jobs), len(jobs), "done")
    return Run(
        checkpoint=plan.checkpoint.path,
        input=plan.input_description,
        against=plan.against,
        truth=_truth(plan),
        environment=environment(),
        results=tuple(results),
        seconds=time.perf_counter() - start,
        mesh=_mesh_description(plan.request),
    )


def as_json(run: Run) -> dict[str, Any]:
    """The run with its verdicts spelled out; FORMAT names this layout."""
    results = []
    for result in run.results:
        stages = [
            jsonable(stage)
            | {"ok": stage.ok, "reasons": list(stage.reasons)}
            | {"checks": [jsonable(check) | {"ok": check.ok} for check in stage.checks]}
            for stage in result.stages
        ]
        first = result.first_divergence
        verdicts = {"ok": result.ok, "first_divergence": None if first is None else first.stage, "stages": stages}
        results.append(jsonable(result) | verdicts)
    return {"format": FORMAT, "ok": run.ok, "verdict": run.verdict} | jsonable(run) | {"results": results}


def environment() -> dict[str, str]:
    """The versions and devices that numbers depend on."""
    devices = jax.devices()
    device = devices[0]
    return {name: _version(name) for name in ("k3jax", "jax", "jaxlib", "flax", "numpy")} | {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": f"{len(devices)} x {device.device_kind}"
        + f" ({device.platform})" * (device.platform != device.device_kind),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed, run from its source"


def _compare(plan: Plan, layer: int, recipe: str) -> LayerComparison:
    request = plan.request
    options = LoadOptions(
        quantize_plain=request.quantize_plain, dense_weights=request.dense_weights, transport=request.transport
    )
    loaded = load_layer(
        request.checkpoint,
        layer,
        mesh=plan.mesh,
        tokens=request.layout,
        recipe=recipe,
        implementation=request.implementation,
        options=options,
    )
    captured = None if plan.capture is None else plan.capture.layers[layer]
    if captured is None:
        x = unit_normal(request.tokens or DEFAULT_TOKENS, plan.checkpoint.config.hidden_size, request.seed)
    else:
        captured = {stage: values[: request.tokens] for stage, values in captured.items()}
        x = captured["input"]
        if x.dtype == np.float64:  # A layer takes no float64; engines' inputs are narrower than what holds them.
            x = x.astype(np.float32)
    tensors = plan.checkpoint.read_layer(layer)
    return compare_layer(
        loaded,
        plan.checkpoint.config,
        tensors,
        x,
        index=layer,
        recipe=recipe,
        against=plan.against,
        captured=captured,
        dense_weights=request.dense_weights,
    )


def unit_normal(tokens: int, hidden: int, seed: int) -> Array:
    """bfloat16 `[tokens, hidden]`, normal with variance 1: what a layer sees after its block's norm."""
    values = np.random.default_rng(seed).standard_normal((tokens, hidden), np.float32)
    return values.astype(ml_dtypes.bfloat16)


def parse_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """`"0,1,5-7"` -> `(0, 1, 5, 6, 7)`, sorted, each once.

    Raises:
        ValueError: a part is neither a number nor a range, or names a layer that the model lacks.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not all(piece.isascii() and piece.isdecimal() for piece in ((first, last) if dash else (first,))):
            raise ValueError(f"layers {text!r}: {part!r} is neither a layer such as 3 nor a range such as 5-7")
        low, high = int(first), int(last if dash else first)
        if not low <= high < num_layers:
            raise ValueError(f"layers {text!r}: {part!r} is not within the model's layers 0-{num_layers - 1}")
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def _mesh_description(request: Request) -> str:
    """`data=1, expert=4, tensor=2, sharded tokens`, with the transport if one is asked for; empty without a mesh."""
    if request.mesh is None:
        return ""
    axes = [f"{axis}={size}" for axis, size in dataclasses.asdict(request.mesh).items()]
    return ", ".join([*axes, f"{request.layout} tokens", *filter(None, [request.transport])])


def _truth(plan: Plan) -> str:
    if plan.capture is not None:
        return f"the capture of {plan.capture.engine}, {plan.capture.recipe}, {plan.capture.rounding_order} rounding"
    if plan.against == "exact":
        return "exact float64"
    return "the float64 oracle"


def _open_capture(request: Request, checkpoint: Checkpoint) -> Capture:
    if not Path(request.against).exists():
        raise FileNotFoundError(f"--against {request.against} is neither oracle nor exact nor the file of a capture")
    capture = Capture.open(request.against)
    capture.check_against(checkpoint.config)
    return capture


def _layers(request: Request, checkpoint: Checkpoint, capture: Capture | None) -> tuple[int, ...]:
    """Those asked for; else a capture's; else the first dense one and the first with experts."""
    config = checkpoint.config
    if request.layers is not None:
        layers = parse_layers(request.layers, config.num_hidden_layers)
        for layer in layers:
            if capture is not None and layer not in capture.layers:
                raise ValueError(f"{capture.path} has no layer {layer}; it has {', '.join(map(str, capture.layers))}")
        return layers
    if capture is not None:
        return tuple(capture.layers)
    kinds = {config.is_moe(layer): layer for layer in reversed(range(config.num_hidden_layers))}
    return tuple(sorted(kinds.values()))


def _recipes(
    request: Request, checkpoint: Checkpoint, layers: tuple[int, ...], capture: Capture | None
) -> tuple[str, ...]:
    """Those asked for; else a capture's own, or the default ones that the checkpoint's experts can run."""
    recipes = request.recipes
    if recipes is None:
        recipes = DEFAULT_RECIPES if capture is None else (capture.recipe,)
        plain = any(name.startswith(EXPERTS) and name.endswith(".weight") for name in _suffixes(checkpoint, layers))
        if plain and capture is None and not request.quantize_plain:
            recipes = ("bf16",)
    for recipe in recipes:
        if recipe not in RECIPES:
            raise ValueError(f"--recipe {recipe!r} is not one of {', '.join(RECIPES)}")
        if capture is not None and RECIPES[recipe].quantize is not RECIPES[capture.recipe].quantize:
            raise ValueError(
                f"--recipe {recipe} cannot be compared with {capture.path}: its recipe is {capture.recipe}, whose "
                "activations are quantised differently"
            )
    return tuple(dict.fromkeys(recipes))


def _suffixes(checkpoint: Checkpoint, layers: tuple[int, ...]) -> list[str]:
    return [suffix for layer in layers if checkpoint.config.is_moe(layer) for suffix in checkpoint.layer_names(layer)]
