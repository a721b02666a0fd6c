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
from k3jax.options import DEFAULTS, LoadOptions

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
    measure: int = 0


@dataclass(frozen=True)
class Result:
    """What came of it; errors are relative L2 over held-out tokens.

    Attributes:
        kept: ids of the experts that were kept, by their old numbers. uncut: the errors of the layer before the cut.
        frozen_bytes, trained_bytes, activation_bytes: the parts of `memory`'s bound. peak_bytes: what the device saw.
        times: of a step, if they were measured.
    """

    request: Request
    config: K3Config | None
    kept: list[int] | None
    uncut: dict[str, float]
    before: dict[str, float]
    after: dict[str, float]
    healed: Healed
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
    if request.dense_weights != "bf16":
        layer = _load(request, LoadOptions(dense_weights=request.dense_weights))
    if kept is not None:
        assert isinstance(layer, MoE)
        layer = cut_experts(layer, kept)
    if request.adapters is not None:
        _adapt(layer, request.adapters, request)
    before = relative_errors(layer, held_out)
    tell(f"before: relative L2 {before['output']:.4f} of the output on {len(held_out)} held-out tokens")
    healed = train(layer, training, request.plan, states=request.states, progress=progress)
    peak = memory.peak_bytes()
    after = relative_errors(healed.layer, held_out)
    tell(f"after:  relative L2 {after['output']:.4f}, {before['output'] / max(after['output'], 1e-12):.2f} times less")
    frozen_bytes, trained_bytes = memory.state_bytes(layer)
    config = layer.config if isinstance(layer, MoE) else None
    micro = request.plan.batch // request.plan.accumulate
    parameters = trained_bytes // memory.BYTES_A_PARAMETER
    return Result(
        request=request,
        config=config,
        kept=None if kept is None else kept.tolist(),
        uncut=uncut,
        before=before,
        after=after,
        healed=healed,
        frozen_bytes=frozen_bytes,
        trained_bytes=trained_bytes,
        activation_bytes=None if config is None else memory.activation_bytes(config, micro, parameters),
        peak_bytes=peak,
        times=time_steps(healed.layer, training, request.plan, request.measure) if request.measure else None,
        seconds=time.perf_counter() - began,
    )


def to_save(result: Result) -> GatedMLP | MoE:
    """The healed layer as a checkpoint holds it: with the checkpoint's own dense weights where e4m3 froze them."""
    healed, request = result.healed.layer, result.request
    if request.dense_weights == "bf16" or not isinstance(healed, MoE):
        return healed
    layer = _load(request)
    assert isinstance(layer, MoE)
    layer = layer if result.kept is None else cut_experts(layer, np.array(result.kept))
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
        | {"tokens_per_second": healed.tokens_per_second, "history": healed.history}
    )


def _load(request: Request, options: LoadOptions = DEFAULTS) -> GatedMLP | MoE:
    how: dict[str, Any] = {"recipe": request.recipe, "implementation": request.implementation}
    if request.checkpoint is None:
        assert request.keep is not None
        return synthetic_layer(real_widths(2 * request.keep), seed=request.plan.seed, **how)
    return load_layer(request.checkpoint, request.layer, options=options, **how)


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


_scores = nnx.jit(lambda layer, x, by: expert_scores(layer, x, by=by), static_argnums=2)
