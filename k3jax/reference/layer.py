"""The oracle: Kimi K3's dense and mixture-of-experts layers in NumPy float64, written to be read.

It computes one of two truths. Mode "oracle" is float64 arithmetic *with* the recipe's quantisation and the official
model's rounding points: what an implementation must reproduce. Mode "exact" has neither: what a recipe costs. It shares
no code with the layer that it judges.

A dense layer is the gated MLP alone,

    output = W_down act(W_gate x, W_up x)

and a mixture-of-experts layer is, for each token x [D],

    router_logits  = W_router x                                                        [E]
    expert_ids     = the X largest of s + bias, s = sigmoid(router_logits)             [X]
    expert_weights = s[expert_ids] / (sum + 1e-20) * routed_scaling_factor             [X]
    latent         = W_latent_down x                                                   [L]
    expert_sum     = sum_k weight_k * W2_k act(W1_k latent, W3_k latent)               [L]
    normed_latent  = gain * expert_sum / sqrt(mean(expert_sum^2) + eps)                [L]
    shared         = the shared experts' gated MLP of x                                [D]
    output         = W_latent_up normed_latent + shared                                [D]

In mode "oracle", every GEMM's result, every activation and every stage from `latent` on is rounded to bfloat16.
"""

from collections.abc import Mapping
from typing import Any, Literal, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from k3jax.reference.formats import Values, round_bf16
from k3jax.reference.recipes import Mode, Numbers

__all__ = ["activation", "expert_rows", "oracle_trace", "round_bf16"]

Tensors = Mapping[str, NDArray[Any]]
Ids = NDArray[np.integer]
Role = Literal["dense", "expert", "router"]

CHUNK = 2**23
"""Weights held in float64 at a time, 64 MiB: a dense layer at full size would take 6 GB at once."""


class _Situ(Protocol):
    @property
    def beta(self) -> float: ...
    @property
    def linear_beta(self) -> float | None: ...


@runtime_checkable
class LayerNumbers(Protocol):
    """What the oracle reads of a K3Config."""

    @property
    def activation(self) -> object: ...
    @property
    def num_experts_per_token(self) -> int | None: ...
    @property
    def router_activation(self) -> str: ...
    @property
    def renormalize(self) -> bool: ...
    @property
    def routed_scaling_factor(self) -> float: ...
    @property
    def num_expert_group(self) -> int: ...
    @property
    def topk_group(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...


def activation(config: LayerNumbers, gate: NDArray[Any], up: NDArray[Any]) -> Values:
    """The layer's activation in float64, without rounding; gate and up of one shape.

        SiTU:    beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)
        SwiGLU:  gate * sigmoid(gate) * up

    `linear_beta` None leaves the up branch as it is.
    """
    gate, up = np.asarray(gate, np.float64), np.asarray(up, np.float64)
    kind = type(config.activation).__name__
    if kind == "SwiGLU":
        return gate * _sigmoid(gate) * up
    if kind != "Situ":
        raise NotImplementedError(f"the oracle knows the activations Situ and SwiGLU, not {kind}")
    situ = cast(_Situ, config.activation)
    bounded_gate = situ.beta * np.tanh(gate / situ.beta)
    bounded_up = up if situ.linear_beta is None else situ.linear_beta * np.tanh(up / situ.linear_beta)
    return bounded_gate * _sigmoid(gate) * bounded_up


def _sigmoid(x: Values) -> Values:
    with np.errstate(over="ignore"):  # exp overflows below -709, where 1 / (1 + inf) = 0 is right
        return 1 / (1 + np.exp(-x))


def _softmax(x: Values) -> Values:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _linear(x: Values, tensors: Tensors, name: str, numbers: Numbers, role: Role = "dense") -> Values:
    """x [S, K] times the transpose of the weight [N, K] called `name`, packed or plain: [S, N], not rounded."""
    packed = f"{name}.weight_packed" in tensors
    stored = tensors[f"{name}.weight_packed" if packed else f"{name}.weight"]
    scales = tensors.get(f"{name}.weight_scale")
    rows = max(1, CHUNK // (128 * x.shape[-1])) * 128
    result = np.empty((len(x), len(stored)))
    for start in range(0, len(stored), rows):
        part = slice(start, start + rows)
        if scales is None:
            weight = numbers.plain_weight(stored[part])
        elif packed:
            weight = numbers.packed_weight(stored[part], scales[part])
        else:
            weight = numbers.nvfp4_weight(stored[part], scales[part], tensors[f"{name}.weight_scale_2"])
        if role == "expert" and not packed:
            weight = numbers.expert_weight(weight)
        if role == "dense":
            weight = numbers.dense_weight(weight)
        result[:, part] = x @ weight.T
    return result


def _gated_mlp(x: Values, config: LayerNumbers, tensors: Tensors, prefix: str, numbers: Numbers) -> Values:
    """W_down act(W_gate x, W_up x): the dense layer [T, D] -> [T, D], and the shared experts."""
    gate = numbers.bf16(_linear(x, tensors, f"{prefix}.gate_proj", numbers))
    up = numbers.bf16(_linear(x, tensors, f"{prefix}.up_proj", numbers))
    hidden = numbers.bf16(activation(config, gate, up))
    return numbers.bf16(_linear(hidden, tensors, f"{prefix}.down_proj", numbers))


def expert_rows(
    config: LayerNumbers, tensors: Tensors, expert: int, rows: NDArray[Any], *, recipe: str, mode: Mode = "oracle"
) -> Values:
    """One routed expert's output before its weight: latent rows [S, L] -> [S, L] float64 (D for L without a latent).

    W2 act(W1 q(rows), W3 q(rows)),    q the recipe's activation format, applied again to the activation's result
    """
    numbers = Numbers(recipe, mode)
    prefix = f"block_sparse_moe.experts.{expert}"
    entering = numbers.expert_input(numbers.bf16(rows.astype(np.float64)))
    gate = numbers.bf16(_linear(entering, tensors, f"{prefix}.w1", numbers, "expert"))
    up = numbers.bf16(_linear(entering, tensors, f"{prefix}.w3", numbers, "expert"))
    hidden = numbers.expert_input(numbers.bf16(activation(config, gate, up)))
    return numbers.bf16(_linear(hidden, tensors, f"{prefix}.w2", numbers, "expert"))


def _scores(config: LayerNumbers, logits: Values) -> Values:
    """[T, E] router logits -> the unbiased scores s."""
    if config.router_activation == "sigmoid":
        return _sigmoid(logits)
    if config.router_activation == "softmax":
        return _softmax(logits)
    raise NotImplementedError(f"the oracle knows sigmoid and softmax routers, not {config.router_activation!r}")


def _choose(config: LayerNumbers, biased: Values) -> NDArray[np.int32]:
    """The ids [T, X] int32 of the X best of the biased scores [T, E], best first, a tie to the lowest id.

    With several groups of experts, only the `topk_group` best groups take part; a group's score is the sum of its two
    best.
    """
    tokens, experts = biased.shape
    groups, kept = config.num_expert_group, config.topk_group
    if groups > 1 and groups > kept:
        by_group = biased.reshape(tokens, groups, experts // groups)
        group_scores = np.sort(by_group, axis=-1)[..., -2:].sum(axis=-1)
        best_groups = np.argsort(-group_scores, axis=-1, kind="stable")[:, :kept]
        taking_part = np.zeros((tokens, groups, 1), dtype=bool)
        np.put_along_axis(taking_part, best_groups[..., None], True, axis=1)
        biased = np.where(taking_part, by_group, -np.inf).reshape(tokens, experts)
    ids = np.argsort(-biased, axis=-1, kind="stable")[:, : config.num_experts_per_token]
    return ids.astype(np.int32)


def _weigh(config: LayerNumbers, scores: Values, ids: Ids) -> Values:
    """Weights [T, X]: the unbiased scores at `ids`, 0 where the id is -1, summing to the scaling factor if X > 1."""
    weights = np.where(ids >= 0, np.take_along_axis(scores, np.maximum(ids, 0), axis=-1), 0)
    if config.renormalize and ids.shape[-1] > 1:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return weights * config.routed_scaling_factor


def _sum_experts(
    config: LayerNumbers, tensors: Tensors, latent: Values, ids: Ids, weights: Values, numbers: Numbers
) -> Values:
    """sum_k weights[t, k] * expert ids[t, k] of latent[t]: [T, L], rounded once; one expert in memory at a time."""
    total = np.zeros_like(latent)
    for expert in np.unique(ids[ids >= 0]):
        tokens, picks = np.nonzero(ids == expert)
        outputs = expert_rows(config, tensors, int(expert), latent[tokens], recipe=numbers.recipe, mode=numbers.mode)
        np.add.at(total, tokens, weights[tokens, picks, None] * outputs)  # a token may pick one expert twice
    return numbers.bf16(total)


def _rms_norm(x: Values, gain: NDArray[Any], eps: float, numbers: Numbers) -> Values:
    """gain * (x / sqrt(mean(x^2) + eps)), [T, L]; the quotient is rounded before the gain multiplies it."""
    normed = numbers.bf16(x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps))
    return numbers.bf16(normed * numbers.plain_weight(gain))


def oracle_trace(
    config: LayerNumbers,
    tensors: Tensors,
    x: NDArray[Any],
    *,
    recipe: str,
    mode: Mode = "oracle",
    dense_weights: str = "bf16",
    ids: Ids | None = None,
    mask: NDArray[np.bool_] | None = None,
) -> dict[str, NDArray[Any]]:
    """Every stage of one layer, as float64 arrays by name (the module's docstring has their formulas and shapes).

    config   a K3Config, or anything with its fields
    tensors  the layer's tensors as the checkpoint stores them, by the name that follows `layers.N.`:
             `mlp.gate_proj.weight`, `block_sparse_moe.experts.3.w1.weight_packed`, ...
    x        [T, D], any float dtype. The router reads it as it is; all else reads it rounded to bf16
    recipe   "bf16", "w4a16", "w4a8" or "w4a8_fp8"
    mode     "oracle" (the recipe's quantisation, the official rounding points) or "exact" (neither)
    dense_weights  "bf16", or "fp8" for shared experts, latent projections and a dense layer's MLP in e4m3 by blocks
    ids      [T, X] integers: route by these instead of the oracle's own picks, so that a near tie decided the other way
             doesn't reach the later stages; -1 routes to nothing. Their weights are the oracle's own scores
    mask     [T] bool: False routes a token to nothing. A dense layer has no use for it

    A dense layer has the stage `output`. A mixture-of-experts layer has those of the formulas, without `latent`,
    `normed_latent` or `shared` where the layer has no such part; `expert_ids` (int32) are always the oracle's own
    picks, and `expert_scores` [T, E] the biased scores that they follow from.
    """
    numbers = Numbers(recipe, mode, dense_weights)
    if x.ndim != 2:
        raise ValueError(f"x must be [T, D]: got the shape {x.shape}; flatten the tokens first")
    exact_x = x.astype(np.float64)
    rounded_x = numbers.bf16(exact_x)
    if "block_sparse_moe.gate.weight" not in tensors:
        return {"output": _gated_mlp(rounded_x, config, tensors, "mlp", numbers)}
    trace, routes = _route(config, tensors, exact_x, ids, mask, numbers)
    return trace | _experts_and_output(config, tensors, rounded_x, routes, trace["expert_weights"], numbers)


def _route(
    config: LayerNumbers,
    tensors: Tensors,
    x: Values,
    ids: Ids | None,
    mask: NDArray[np.bool_] | None,
    numbers: Numbers,
) -> tuple[dict[str, NDArray[Any]], Ids]:
    """The router's stages, and the ids [T, X] to follow: those given, or the oracle's own."""
    logits = _linear(x, tensors, "block_sparse_moe.gate", numbers, "router")
    scores = _scores(config, logits)
    biased = scores + tensors["block_sparse_moe.gate.e_score_correction_bias"].astype(np.float64)
    own = _choose(config, biased)
    if mask is not None:
        own[~mask] = -1
    routes = own if ids is None else _checked_ids(ids, *logits.shape)
    weights = _weigh(config, scores, routes)
    return {"router_logits": logits, "expert_scores": biased, "expert_ids": own, "expert_weights": weights}, routes


def _checked_ids(ids: Ids, tokens: int, experts: int) -> Ids:
    if ids.ndim != 2 or len(ids) != tokens or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"ids must be integers [T, X] with T = {tokens}: got the shape {ids.shape} of {ids.dtype}")
    if ids.size and (ids.min() < -1 or ids.max() >= experts):
        raise ValueError(f"ids must lie in -1 (nothing) ... {experts - 1}: got {ids.min()} ... {ids.max()}")
    return ids


def _experts_and_output(
    config: LayerNumbers, tensors: Tensors, x: Values, ids: Ids, weights: Values, numbers: Numbers
) -> dict[str, NDArray[Any]]:
    """The stages after the router: which parts the layer has is told by its tensors."""
    prefix = "block_sparse_moe"
    trace: dict[str, NDArray[Any]] = {}
    routed = x
    has_latent = any(name.startswith(f"{prefix}.routed_expert_down_proj.") for name in tensors)
    if has_latent:
        routed = trace["latent"] = numbers.bf16(_linear(x, tensors, f"{prefix}.routed_expert_down_proj", numbers))
    routed = trace["expert_sum"] = _sum_experts(config, tensors, routed, ids, weights, numbers)
    gain = tensors.get(f"{prefix}.routed_expert_norm.weight")
    if gain is not None:
        routed = trace["normed_latent"] = _rms_norm(routed, gain, config.rms_norm_eps, numbers)
    if has_latent:
        routed = numbers.bf16(_linear(routed, tensors, f"{prefix}.routed_expert_up_proj", numbers))
    if any(name.startswith(f"{prefix}.shared_experts.") for name in tensors):
        shared = trace["shared"] = _gated_mlp(x, config, tensors, f"{prefix}.shared_experts", numbers)
        routed = numbers.bf16(routed + shared)
    trace["output"] = routed
    return trace
