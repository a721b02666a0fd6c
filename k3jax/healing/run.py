"""From a request to a healed layer: teacher, tokens, the cut, training, and what it came to."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from k3jax.checkpoint import Checkpoint
from k3jax.compare.capture import Capture
from k3jax.compare.run import environment
from k3jax.config import K3Config
from k3jax.healing import memory
from k3jax.healing.pairs import CHUNK, Pairs, from_capture, from_teacher
from k3jax.healing.pruning import RULES, best_experts, cut_experts, expert_scores
from k3jax.healing.synthetic import real_widths, synthetic_layer
from k3jax.healing.timing import StepTimes, time_steps
from k3jax.healing.tokens import structured_tokens
from k3jax.healing.training import Healed, Plan, Progress, relative_errors, train
from k3jax.loading import load_layer
from k3jax.merging import add_adapters
from k3jax.mlp import GatedMLP
from k3jax.moe import MoE
from k3jax.options import LoadOptions
from sharding import MeshSizes, make_mesh

FORMAT = "k3jax-healing-1"
DEFAULT_TOKENS = 8192
HELD_OUT = 8  # One token in so many is not trained on.


@dataclass(frozen=True)
class Adapters:
    """What `add_adapters` is asked for."""

    rank: int
    scale: float = 1.0
    shared: bool = False


@dataclass(frozen=True)
class Request:
    """What `scripts/heal.py` was asked for.

    Attributes:
        checkpoint: a folder, or None for a random layer at the release's widths with twice `keep` experts.
        keep: experts to keep, chosen `by` one of `pruning.RULES`; None keeps all.
        teacher: a capture file; None for the whole layer. tokens: how many; with a capture, at most so many of its own.
        states: a folder to resume from and to leave states in.
        adapters: low-rank adapters for the routed experts, None for none. dense_weights: "bf16", or "fp8" for a student
            whose shared experts and latent projections are quantised and frozen.
        mesh: what teacher and student run over; None for one device. layout: of the tokens on it, "replicated" or
            "sharded".
        measure: afterwards, time so many steps, and their forward passes alone.
    """

    checkpoint: Path | None
    plan: Plan
    layer: int = 1
    keep: int | None = None
    by: str = "output-norm"
    recipe: str = "w4a16"
    implementation: str | None = None
    teacher: Path | None = None
    tokens: int | None = None
    states: Path | None = None
    adapters: Adapters | None = None
    dense_weights: str = "bf16"
    mesh: MeshSizes | None = None
    layout: str = "replicated"
    measure: int = 0


@dataclass(frozen=True)
class Result:
    """What came of it; errors are relative L2 over held-out tokens.

    Attributes:
        kept: ids of the experts that were kept, by their old numbers. uncut: the errors of the layer before the cut.
        cut_bytes: what the layer takes before and after the cut, which are held together while it is made.
        frozen_bytes, trained_bytes, activation_bytes: the parts of `memory`'s bound, the last of one device without a
            mesh. peak_bytes: what the first device saw until training ended. All are bytes of one device.
        times: of a step, if they were measured.
    """

    request: Request
    config: K3Config | None
    kept: list[int] | None
    uncut: dict[str, float]
    before: dict[str, float]
    after: dict[str, float]
    healed: Healed
    cut_bytes: int | None
    frozen_bytes: int
    trained_bytes: int
    activation_bytes: int | None
    peak_bytes: int | None
    times: StepTimes | None
    seconds: float


def check(request: Request) -> None:
    """Raises ValueError for what is wrong in the request itself, before anything is loaded."""
    if request.by not in RULES:
        raise ValueError(f"by={request.by!r} is not one of {', '.join(RULES)}")
    if request.checkpoint is None and (request.keep is None or request.teacher is not None):
        raise ValueError("a synthetic layer needs keep (it has twice as many experts), and is its own teacher")
    if request.checkpoint is None and request.dense_weights != "bf16":
        raise ValueError(f"dense_weights={request.dense_weights!r} needs a checkpoint, not a synthetic layer")
    if request.tokens is not None and request.tokens * (HELD_OUT - 1) // HELD_OUT < request.plan.batch:
        raise ValueError(
            f"tokens={request.tokens}, one in {HELD_OUT} held out, leave fewer to train on than a batch of "
            f"{request.plan.batch}"
        )
    if request.mesh is None:
        if request.layout != "replicated":
            raise ValueError(f"tokens {request.layout} need a mesh, such as expert=8")
        return
    if request.checkpoint is None:
        raise ValueError("a synthetic layer is made on one device: name a checkpoint, or no mesh")
    if request.keep is not None and request.keep % request.mesh.expert:
        raise ValueError(f"keep={request.keep} experts cannot be shared evenly over expert={request.mesh.expert}")


def heal(request: Request, progress: Progress, tell: Callable[[str], None]) -> Result:
    """Runs it all; `tell` gets a line for each part that is done.

    Raises:
        ValueError, FileNotFoundError, NotImplementedError: the request, the checkpoint or the capture is wrong.
    """
    began = time.perf_counter()
    check(request)
    layer = _load(request)
    pairs = _pairs(request, layer)
    training, held_out = pairs.split(max(len(pairs) // HELD_OUT, 1))
    uncut = relative_errors(layer, held_out)
    kept = None if request.keep is None else _kept(layer, training, request)
    tell(_plan_line(request, layer, len(training), len(held_out), uncut["output"]))
    if request.dense_weights != "bf16":
        del layer  # The student's experts are these: once is enough.
        layer = _load(request, request.dense_weights)
    before_cut = memory.tree_bytes(layer)
    layer = _cut(layer, kept, request)
    if request.adapters is not None:
        _adapt(layer, request.adapters, request)
    before = relative_errors(layer, held_out)
    tell(f"before: {_errors_line(before)}")
    healed = train(layer, training, request.plan, states=request.states, progress=progress)
    peak = memory.peak_bytes()
    after = relative_errors(healed.layer, held_out)
    tell(f"after:  {_errors_line(after, before)}")
    frozen_bytes, trained_bytes = memory.state_bytes(layer)
    bounded = isinstance(layer, MoE) and request.mesh is None
    return Result(
        request=request,
        config=layer.config if isinstance(layer, MoE) else None,
        kept=None if kept is None else kept.tolist(),
        uncut=uncut,
        before=before,
        after=after,
        healed=healed,
        cut_bytes=None if kept is None else before_cut + memory.tree_bytes(layer),
        frozen_bytes=frozen_bytes,
        trained_bytes=trained_bytes,
        activation_bytes=_activation_bytes(layer, request, trained_bytes) if bounded else None,
        peak_bytes=peak,
        times=time_steps(healed.layer, training, request.plan, request.measure) if request.measure else None,
        seconds=time.perf_counter() - began,
    )


def failure(result: Result) -> str | None:
    """Why the healed layer is not what was asked for; None if it is."""
    rate, healed = result.request.plan.schedule.learning_rate, result.healed
    advice = f"try a learning rate below {rate:g}"
    if healed.diverged is not None:
        return f"training diverged: {healed.diverged}; its result is the state after step {healed.step}; {advice}"
    if improved(result):
        return None
    before, after = result.before["output"], result.after["output"]
    return f"training did not lower the error on held-out tokens: {before:.4f} before, {after:.4f} after; {advice}"


def improved(result: Result) -> bool:
    """Whether the healed layer is nearer to the teacher than it was before."""
    return result.after["output"] < result.before["output"]


def to_save(result: Result) -> GatedMLP | MoE:
    """The healed layer as a checkpoint holds it: with the checkpoint's own dense weights where e4m3 froze them."""
    healed, request = result.healed.layer, result.request
    if request.dense_weights == "bf16" or not isinstance(healed, MoE):
        return healed
    layer = _load(request)
    assert isinstance(layer, MoE)
    layer = _cut(layer, None if result.kept is None else np.array(result.kept), request)
    for name in ("router", "latent_norm", "w13", "w2", "adapters"):
        setattr(layer, name, getattr(healed, name))
    return layer


def as_json(result: Result) -> dict[str, Any]:
    """The run for a log; FORMAT names this layout."""
    fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    healed = fields.pop("healed")
    return (
        {"format": FORMAT, "environment": environment()}
        | fields
        | {"step": healed.step, "diverged": healed.diverged}
        | {"tokens_per_second": healed.tokens_per_second, "history": healed.history}
    )


def _load(request: Request, dense_weights: str = "bf16") -> GatedMLP | MoE:
    how: dict[str, Any] = {"recipe": request.recipe, "implementation": request.implementation}
    if request.checkpoint is None:
        assert request.keep is not None
        return synthetic_layer(real_widths(2 * request.keep), seed=request.plan.seed, **how)
    mesh = None if request.mesh is None else make_mesh(**dataclasses.asdict(request.mesh))
    options = LoadOptions(dense_weights=dense_weights)
    return load_layer(request.checkpoint, request.layer, mesh=mesh, tokens=request.layout, options=options, **how)


def _cut(layer: GatedMLP | MoE, kept: np.ndarray | None, request: Request) -> GatedMLP | MoE:
    if kept is None:
        return layer
    assert isinstance(layer, MoE)
    return cut_experts(layer, kept, tokens=request.layout)


def _adapt(layer: GatedMLP | MoE, adapters: Adapters, request: Request) -> None:
    if not isinstance(layer, MoE):
        raise ValueError(f"layer {request.layer} is dense and has no experts to adapt")
    add_adapters(layer, rngs=nnx.Rngs(request.plan.seed), **dataclasses.asdict(adapters))


def _pairs(request: Request, layer: GatedMLP | MoE) -> Pairs:
    if request.teacher is not None:
        assert request.checkpoint is not None
        Capture.open(request.teacher).check_against(Checkpoint.open(request.checkpoint).config)
        return from_capture(request.teacher, request.layer).take(slice(request.tokens))
    hidden = layer.config.hidden_size if isinstance(layer, MoE) else layer.down.shape[0]
    return from_teacher(layer, structured_tokens(request.tokens or DEFAULT_TOKENS, hidden, seed=request.plan.seed))


def _kept(layer: GatedMLP | MoE, training: Pairs, request: Request) -> np.ndarray:
    if not isinstance(layer, MoE):
        raise ValueError(f"keep={request.keep}: layer {request.layer} is dense and has no experts to cut")
    assert request.keep is not None
    chunks = range(0, len(training), CHUNK)
    each = [np.asarray(_scores(layer, jnp.asarray(training.x[at : at + CHUNK]), request.by)) for at in chunks]
    return best_experts(np.sum(each, axis=0, dtype=np.float64), request.keep)


def _activation_bytes(layer: GatedMLP | MoE, request: Request, trained_bytes: int) -> int:
    assert isinstance(layer, MoE)
    micro = request.plan.batch // request.plan.accumulate
    return memory.activation_bytes(layer.config, micro, trained_bytes // memory.BYTES_A_PARAMETER)


def _plan_line(request: Request, layer: GatedMLP | MoE, training: int, held_out: int, uncut: float) -> str:
    """`layer 1: 16 of 32 experts kept by output-norm; teacher: the whole layer; 7,168 tokens, 1,024 held out`."""
    experts = ""
    if request.keep is not None and isinstance(layer, MoE):
        experts = f"{request.keep} of {layer.config.num_experts} experts kept by {request.by}; "
    teacher = "the whole layer"
    if request.teacher is not None:
        teacher = f"{request.teacher.name}, from which the whole layer differs by {uncut:.4f}"
    return f"layer {request.layer}: {experts}teacher: {teacher}; {training:,} tokens, {held_out:,} more held out"


def _errors_line(errors: dict[str, float], before: dict[str, float] | None = None) -> str:
    """Relative L2 errors on held-out tokens, and how many times less than before."""
    parts = []
    for name, value in errors.items():
        less = f" ({before[name] / value:.2f} times less)" if before is not None and value > 0 else ""
        parts.append(f"{value:.4f}{less} of the {name.replace('_', ' ')}")
    return f"relative L2 error {', '.join(parts)}"


_scores = nnx.jit(lambda layer, x, by: expert_scores(layer, x, by=by), static_argnums=2)
