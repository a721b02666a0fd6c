"""Compares a layer with a truth, stage by stage, and names the first stage that diverges.

The truth is the float64 oracle, given the layer's own picks so that one near tie does not spoil the stages after it, or
another engine's capture. Stages in the order of the data:

router      logits, picks, weights        latent   the down-projection       experts      the weighted sum of experts
norm        the normed latent             shared   the shared experts        output       the whole layer
activation  the layer's own gated activation on a grid that reaches twice the betas

A pure library: nothing is printed. `k3jax compare` shows what this returns.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from k3jax.compare.differences import Difference, difference, expert_errors, histogram, token_errors
from k3jax.compare.picks import Picks, by_expert, compare_picks, same_sets
from k3jax.compare.probes import probe_activation, probe_picks
from k3jax.compare.ranks import RankLoad, rank_loads
from k3jax.compare.tolerances import Against, Limits, limits
from k3jax.config import K3Config
from k3jax.mlp import GatedMLP
from k3jax.moe import MoE
from k3jax.reference import oracle_trace
from pallas_kernels import select

Array = NDArray[Any]
Stages = Mapping[str, Array]

STAGES = ("router", "latent", "experts", "norm", "shared", "output", "activation")
ARRAY_STAGES = {
    "latent": "latent",
    "experts": "expert_sum",
    "norm": "normed_latent",
    "shared": "shared",
    "output": "output",
}
"""Stage -> its entry in a layer's trace, for the stages that are one array."""

_WORST = 5
_ROUTER_BIAS = "block_sparse_moe.gate.e_score_correction_bias"


@dataclasses.dataclass(frozen=True)
class Check:
    """One number held to its limit: `value <= limit`, or `>=` where `at_least`."""

    name: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def ok(self) -> bool:
        """Whether it holds; NaN never does."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        relation = ("at least" if self.at_least else "at most") if self.ok else ("below" if self.at_least else "above")
        return f"{self.name} {self.value:.5g}, {relation} {self.limit:g}"


@dataclasses.dataclass(frozen=True)
class StageResult:
    """One stage's verdict and its numbers.

    Attributes:
        checks: all that was held to a limit, the stage's main number first. The stage is fine when all hold.
        difference: of the whole array (the router's: of its logits); None where there was no array to compare.
        picks: the router's agreement, if the truth has picks.
        token_errors: relative L2 of each token. expert_errors: for the experts stage, over each expert's tokens.
        worst_tokens, worst_experts: the largest of these, with their index.
        histogram: elements by the size of their error (see `differences.histogram`).
        missing: why there was nothing to compare, which is a failure; empty otherwise.
    """

    stage: str
    checks: tuple[Check, ...] = ()
    difference: Difference | None = None
    picks: Picks | None = None
    token_errors: tuple[float, ...] = ()
    expert_errors: tuple[float, ...] = ()
    worst_tokens: tuple[tuple[int, float], ...] = ()
    worst_experts: tuple[tuple[int, float], ...] = ()
    histogram: tuple[int, ...] = ()
    missing: str = ""

    @property
    def ok(self) -> bool:
        """Whether the stage agrees with the truth."""
        return not self.missing and all(check.ok for check in self.checks)

    @property
    def reasons(self) -> tuple[str, ...]:
        """What failed, in words; empty when nothing did."""
        return ((self.missing,) if self.missing else ()) + tuple(str(check) for check in self.checks if not check.ok)


@dataclasses.dataclass(frozen=True)
class LayerComparison:
    """A layer under one recipe against one truth.

    Attributes:
        kind: "dense" or "moe". tokens: how many.
        implementation: of grouped_matmul. expert_load: rows that each expert computed. Both empty for a dense layer.
        skipped_tokens: tokens left out after the router, because a capture went to other experts.
        ranks: what each rank of a mesh did; empty without a mesh and for a dense layer.
    """

    layer: int
    kind: Literal["dense", "moe"]
    recipe: str
    against: Against
    tokens: int
    stages: tuple[StageResult, ...]
    implementation: str = ""
    expert_load: tuple[int, ...] = ()
    skipped_tokens: int = 0
    ranks: tuple[RankLoad, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every stage agrees."""
        return all(stage.ok for stage in self.stages)

    @property
    def first_divergence(self) -> StageResult | None:
        """The first stage, in the order of the data, that does not agree."""
        return next((stage for stage in self.stages if not stage.ok), None)

    def stage(self, name: str) -> StageResult | None:
        """The result of the stage called `name`, if it was compared."""
        return next((stage for stage in self.stages if stage.stage == name), None)


def compare_layer(
    layer: GatedMLP | MoE,
    config: K3Config,
    tensors: Stages,
    x: Array,
    *,
    index: int,
    recipe: str,
    against: Against = "oracle",
    captured: Stages | None = None,
    dense_weights: str = "bf16",
) -> LayerComparison:
    """Runs `layer` on `x [T, D]` and compares every stage with the truth.

    Args:
        config, tensors: the checkpoint's own, which the truth is computed from; never the layer's.
        index: the layer's number, to say it back.
        against: "oracle" or "exact", computed here; "official" or "engine" for a capture, whose stages are `captured`.
        dense_weights: what the layer was loaded with.

    Raises:
        ValueError: `against` and `captured` do not belong together, or the recipe is unknown.
    """
    limit = limits(against, recipe, dense_weights)
    if (captured is not None) != (against in ("official", "engine")):
        raise ValueError(f"{against=} {'needs the stages of a capture' if captured is None else 'takes no capture'}")
    ours = {name: np.asarray(value) for name, value in _trace(layer, jnp.asarray(x)).items()}
    ids = ours.get("expert_ids")
    if captured is None:
        mode: Literal["oracle", "exact"] = "exact" if against == "exact" else "oracle"
        truth: Stages = oracle_trace(config, tensors, x, recipe=recipe, mode=mode, ids=ids, dense_weights=dense_weights)
    else:
        truth = captured
    kept = np.ones(len(x), np.bool_)
    if captured is not None and ids is not None and "expert_ids" in truth:
        kept = same_sets(ids, truth["expert_ids"])
    stages = []
    if "block_sparse_moe.gate.weight" in tensors:
        stages.append(_router(layer, config, tensors, ours, truth, limit))
    stages += [
        _array_stage(stage, ours.get(key), truth.get(key), ids, kept, config, limit)
        for stage, key in ARRAY_STAGES.items()
        if key in truth or (captured is None and key in ours)
    ]
    stages.append(_activation(layer, config, limit))
    return LayerComparison(
        layer=index,
        kind="dense" if ids is None else "moe",
        recipe=recipe,
        against=against,
        tokens=len(x),
        stages=tuple(stages),
        implementation=_implementation(layer),
        expert_load=() if ids is None else _load(ids, config),
        skipped_tokens=int(np.count_nonzero(~kept)),
        ranks=() if ids is None else rank_loads(ids, config, layer.layout),
    )


@jax.jit
def _trace(layer: GatedMLP | MoE, x: jax.Array) -> dict[str, jax.Array]:
    return layer.trace(x)


def _implementation(layer: GatedMLP | MoE) -> str:
    if not isinstance(layer, MoE):
        return ""
    w13 = layer.w13.get_value()
    return select.explain("grouped_matmul", implementation=layer.implementation, w=w13).chosen


def _load(ids: Array, config: K3Config) -> tuple[int, ...]:
    return tuple(np.bincount(ids[ids >= 0], minlength=config.num_experts or 0).tolist())


def _router(
    layer: GatedMLP | MoE, config: K3Config, tensors: Stages, ours: Stages, truth: Stages, limit: Limits
) -> StageResult:
    """Logits, weights, picks as sets (of the tokens, and of a probe that barely chooses), and the bias it holds."""
    if "expert_ids" not in ours or not isinstance(layer, MoE):
        return StageResult("router", missing="the layer has no router")
    ids, bias = ours["expert_ids"], tensors[_ROUTER_BIAS]
    checks = [_l2("bias", difference(np.asarray(layer.router.bias[...]), bias), 0.0)]
    picks, logits = None, None
    errors: Array = np.zeros(0)
    if "router_logits" in truth:
        logits = difference(ours["router_logits"], truth["router_logits"])
        errors = token_errors(ours["router_logits"], truth["router_logits"])
        checks = [
            _l2("logits", logits, limit.router_l2),
            *checks,
            _unbroken("logits NaN or infinite on one side only", logits),
        ]
    if "expert_ids" in truth:
        picks = compare_picks(ids, truth["expert_ids"], _biased_scores(config, truth, bias), limit.near_tie)
        agreement = picks.agreement + picks.near_ties / max(ids.size, 1)
        checks.append(Check("pick agreement", agreement, limit.picks, at_least=True))
    edge = probe_picks(layer, config, tensors)
    if edge is not None:
        checks.append(Check("agreement of close picks", edge.agreement, limit.close_picks, at_least=True))
    if "expert_weights" in truth:
        weights = _weights(ours, truth)
        checks += [
            _l2("weights", weights, limit.router_l2),
            _unbroken("weights NaN or infinite on one side only", weights),
        ]
    return StageResult(
        "router",
        checks=tuple(checks),
        difference=logits,
        picks=picks,
        token_errors=tuple(errors.tolist()),
        worst_tokens=_worst(errors),
        histogram=histogram(ours["router_logits"], truth["router_logits"]) if logits else (),
    )


def _weights(ours: Stages, truth: Stages) -> Difference:
    """Weights by expert. The oracle's were computed for our picks; a capture's count where its picks are ours."""
    ids, weights = ours["expert_ids"], ours["expert_weights"]
    if "expert_scores" in truth:
        return difference(weights, truth["expert_weights"])
    if "expert_ids" not in truth:
        return difference(np.sort(weights, axis=-1), np.sort(truth["expert_weights"], axis=-1))
    same = same_sets(ids, truth["expert_ids"])
    theirs = by_expert(truth["expert_weights"][same], truth["expert_ids"][same])
    return difference(by_expert(weights[same], ids[same]), theirs)


def _biased_scores(config: K3Config, truth: Stages, bias: Array) -> Array | None:
    if "expert_scores" in truth or "router_logits" not in truth:
        return truth.get("expert_scores")
    logits = truth["router_logits"].astype(np.float64)
    exponential = np.exp(logits - logits.max(axis=-1, keepdims=True))
    softmax = exponential / exponential.sum(axis=-1, keepdims=True)
    return (softmax if config.router_activation == "softmax" else 1 / (1 + np.exp(-logits))) + bias


def _array_stage(
    stage: str,
    ours: Array | None,
    truth: Array | None,
    ids: Array | None,
    kept: NDArray[np.bool_],
    config: K3Config,
    limit: Limits,
) -> StageResult:
    if ours is None or truth is None:
        return StageResult(stage, missing=f"the {'layer' if ours is None else 'truth'} has no such stage")
    if not kept.any():
        return StageResult(stage, missing="no token went to the same experts as in the capture")
    ours, truth = ours[kept], truth[kept]
    whole, errors = difference(ours, truth), token_errors(ours, truth)
    allowed = limit.stage_l2(stage, dense=ids is None)
    by_expert: Array = np.zeros(0)
    if stage == "experts" and ids is not None:
        by_expert = expert_errors(ours, truth, ids[kept], config.num_experts or 0)
    return StageResult(
        stage,
        checks=(
            _l2("relative L2", whole, allowed),
            Check("cosine", whole.cosine, limit.cosine, at_least=True),
            Check("worst token", float(errors.max(initial=0.0)), allowed * limit.token_factor),
            Check("difference in the share of non-zeros", abs(whole.nonzero - whole.nonzero_truth), limit.nonzero),
            _unbroken("NaN or infinite on one side only", whole),
        ),
        difference=whole,
        token_errors=tuple(errors.tolist()),
        expert_errors=tuple(by_expert.tolist()),
        worst_tokens=_worst(errors, np.flatnonzero(kept)),
        worst_experts=_worst(by_expert),
        histogram=histogram(ours, truth),
    )


def _activation(layer: GatedMLP | MoE, config: K3Config, limit: Limits) -> StageResult:
    whole, relative = probe_activation(layer, config)
    checks = (
        _l2("relative L2", whole, limit.activation_l2),
        Check("relative error of an element, RMS", relative, limit.activation_relative_rms),
        _unbroken("NaN or infinite on one side only", whole),
    )
    return StageResult("activation", checks=checks, difference=whole)


def _l2(name: str, found: Difference, limit: float) -> Check:
    return Check(name, found.relative_l2, limit)


def _unbroken(name: str, found: Difference) -> Check:
    return Check(name, float(found.broken), 0.0)


def _worst(errors: Array, numbers: Array | None = None) -> tuple[tuple[int, float], ...]:
    """The largest errors with their index (or its entry in `numbers`), largest first; NaN and zero are left out."""
    known = np.where(np.isnan(errors), 0.0, errors)
    order = np.argsort(-known, kind="stable")[:_WORST]
    return tuple((int(i if numbers is None else numbers[i]), float(known[i])) for i in order if known[i] > 0)
