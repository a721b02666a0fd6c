"""The float64 oracle's mathematics, against values found by hand."""

import math
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest

from k3jax.reference import formats
from k3jax.reference import layer as reference
from k3jax.reference.recipes import RECIPES, Mode

BF16 = ml_dtypes.bfloat16


@dataclass(frozen=True)
class Situ:
    """The oracle tells the activation by its class's name."""

    beta: float = 4.0
    linear_beta: float | None = 25.0


@dataclass(frozen=True)
class SwiGLU:
    pass


@dataclass(frozen=True)
class Config:
    activation: object = Situ()
    num_experts_per_token: int | None = 4
    router_activation: str = "sigmoid"
    renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_expert_group: int = 1
    topk_group: int = 1
    rms_norm_eps: float = 1e-5


def relative_l2(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize(
    ("gate", "up", "betas", "expected"),
    [
        (1, 1, (4.0, 25.0), 0.7158178280748405),
        (2, -3, (4.0, 25.0), -4.861066551249868),
        (10, 50, (4.0, 25.0), 95.10802153401491),
        (-10, 50, (4.0, 25.0), -0.004317897497493173),
        (30, 1000, (4.0, 25.0), 99.99993881954526),
        (2, -3, (1.0, None), -2.547338026862606),
    ],
)
def test_situ_values(gate: float, up: float, betas: tuple[float, float | None], expected: float) -> None:
    config = Config(activation=Situ(*betas))
    result = reference.activation(config, np.array([float(gate)]), np.array([float(up)]))
    np.testing.assert_allclose(result, expected, rtol=1e-14)


def test_a_linear_beta_of_none_is_the_identity() -> None:
    up = np.array([1000.0, -3.0])
    gate = np.ones(2)
    ratio = reference.activation(Config(activation=Situ(1.0, None)), gate, up)
    np.testing.assert_allclose(ratio, math.tanh(1.0) / (1 + math.exp(-1.0)) * up, rtol=1e-15)


def test_extreme_gates_give_no_warning_and_no_nan() -> None:
    gate = np.array([-1e5, -800.0, 800.0, 1e5])
    np.testing.assert_allclose(reference.activation(Config(), gate, np.ones(4))[:2], 0, atol=0)
    assert np.all(np.isfinite(reference.activation(Config(), gate, np.ones(4))))


def test_swiglu_and_an_unknown_activation() -> None:
    result = reference.activation(Config(activation=SwiGLU()), np.array([2.0]), np.array([-3.0]))
    np.testing.assert_allclose(result, -6 / (1 + math.exp(-2)), rtol=1e-15)
    with pytest.raises(NotImplementedError, match="not int"):
        reference.activation(Config(activation=3), np.zeros(1), np.zeros(1))


def pack(codes: np.ndarray) -> np.ndarray:
    """[N, K] codes -> [N, K/2] bytes, low nibble first."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)


def expert_tensors(expert: int, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Packed tensors of weights that hold E2M1 values only, under scale byte 127."""
    tensors = {}
    for name, weight in weights.items():
        codes = weight.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        prefix = f"block_sparse_moe.experts.{expert}.{name}"
        tensors[f"{prefix}.weight_packed"] = pack(codes)
        tensors[f"{prefix}.weight_scale"] = np.full((len(codes), codes.shape[1] // 32), 127, np.uint8)
    return tensors


def one_pick_layer() -> dict[str, np.ndarray]:
    """D = L = F = 32, two experts. Expert 0's gate row 0 reads 1 * h0 and its up row 0 reads 2 * h1; w2 puts 3 times
    their activation into output 4. Expert 1 has gate and up the other way round."""
    gate, up, down = (np.zeros((32, 32)) for _ in range(3))
    gate[0, 0], up[0, 1], down[4, 0] = 1, 2, 3
    eye = np.eye(32).astype(BF16)
    zero = np.zeros((32, 32), BF16)
    shared_gate, shared_up, shared_down = zero.copy(), zero.copy(), zero.copy()
    shared_gate[0, 2], shared_up[0, 3], shared_down[5, 0] = 1, 1, 0.5
    router = np.zeros((2, 32), BF16)
    router[0, 0] = 1
    return {
        "block_sparse_moe.gate.weight": router,
        "block_sparse_moe.gate.e_score_correction_bias": np.array([0.0, 0.25], np.float32),
        "block_sparse_moe.routed_expert_down_proj.weight": eye,
        "block_sparse_moe.routed_expert_norm.weight": np.full(32, 2, BF16),
        "block_sparse_moe.routed_expert_up_proj.weight": eye,
        "block_sparse_moe.shared_experts.gate_proj.weight": shared_gate,
        "block_sparse_moe.shared_experts.up_proj.weight": shared_up,
        "block_sparse_moe.shared_experts.down_proj.weight": shared_down,
        **expert_tensors(0, {"w1": gate, "w3": up, "w2": down}),
        **expert_tensors(1, {"w1": up, "w3": gate, "w2": down}),
    }


def situ(gate: float, up: float) -> float:
    return 4 * math.tanh(gate / 4) / (1 + math.exp(-gate)) * 25 * math.tanh(up / 25)


@pytest.mark.parametrize("picked", [0, 1])
def test_one_token_by_hand(picked: int) -> None:
    """h0 = 8, h1 = -1, h2 = 1, h3 = 2; with h0 = -8 the bias brings expert 1 forward."""
    h0 = 8.0 if picked == 0 else -8.0
    x = np.zeros((1, 32))
    x[0, :4] = h0, -1, 1, 2
    trace = reference.oracle_trace(Config(num_experts_per_token=1), one_pick_layer(), x, recipe="bf16", mode="exact")
    gate, up = (h0, -2.0) if picked == 0 else (-2.0, h0)
    score = 1 / (1 + math.exp(-h0)) if picked == 0 else 0.5
    routed = score * 3 * situ(gate, up)  # one pick: its score is not renormalised
    normed = 2 * routed / math.sqrt(routed**2 / 32 + 1e-5)
    assert trace["expert_ids"].tolist() == [[picked]]
    np.testing.assert_allclose(trace["router_logits"], [[h0, 0]])
    np.testing.assert_allclose(trace["expert_scores"], [[1 / (1 + math.exp(-h0)), 0.75]], rtol=1e-14)
    np.testing.assert_allclose(trace["expert_weights"], [[score]], rtol=1e-14)
    np.testing.assert_array_equal(trace["latent"], x)
    expected = {"expert_sum": {4: routed}, "normed_latent": {4: normed}, "shared": {5: situ(1, 2) / 2}}
    expected["output"] = {4: normed, 5: situ(1, 2) / 2}
    for stage, entries in expected.items():
        row = np.zeros((1, 32))
        row[0, list(entries)] = list(entries.values())
        np.testing.assert_allclose(trace[stage], row, rtol=1e-13, err_msg=stage)


def test_the_rounding_points_by_hand() -> None:
    """The same token in mode "oracle": each value is rounded where the official model rounds it."""
    x = np.zeros((1, 32))
    x[0, :4] = 8.03, -1.01, 1.007, 2.003
    trace = reference.oracle_trace(Config(num_experts_per_token=1), one_pick_layer(), x, recipe="bf16")
    rounded = x.astype(np.float32).astype(BF16).astype(np.float64)

    def bf16(value: float) -> float:
        return float(np.float32(value).astype(BF16))

    score = 1 / (1 + math.exp(-8.03))  # the router reads x as it is
    routed = bf16(score * bf16(3 * bf16(situ(rounded[0, 0], bf16(2 * rounded[0, 1])))))
    normed = bf16(2 * bf16(routed / math.sqrt(routed**2 / 32 + 1e-5)))
    shared = bf16(bf16(situ(rounded[0, 2], rounded[0, 3])) / 2)
    np.testing.assert_allclose(trace["router_logits"][0, 0], 8.03)
    np.testing.assert_array_equal(trace["latent"], rounded)
    assert [trace["expert_sum"][0, 4], trace["output"][0, 4], trace["output"][0, 5]] == [routed, normed, shared]


def random_layer(experts: int = 8, latent: int = 64, hidden: int = 128, width: int = 96) -> dict[str, np.ndarray]:
    """Weights that keep unit-normal tokens near unit size at every stage."""
    rng = np.random.default_rng(7)

    def weight(out: int, inner: int) -> np.ndarray:
        return (rng.standard_normal((out, inner)) / math.sqrt(inner)).astype(np.float32).astype(BF16)

    tensors = {
        "gate.weight": weight(experts, hidden),
        "gate.e_score_correction_bias": rng.standard_normal(experts).astype(np.float32) * 0.01,
        "routed_expert_down_proj.weight": weight(latent, hidden),
        "routed_expert_norm.weight": (1 + 0.1 * rng.standard_normal(latent)).astype(np.float32).astype(BF16),
        "routed_expert_up_proj.weight": weight(hidden, latent),
        "shared_experts.gate_proj.weight": weight(width, hidden),
        "shared_experts.up_proj.weight": weight(width, hidden),
        "shared_experts.down_proj.weight": weight(hidden, width),
    }
    for expert in range(experts):
        for name, shape in {"w1": (width, latent), "w3": (width, latent), "w2": (latent, width)}.items():
            codes = rng.integers(0, 16, shape)
            tensors[f"experts.{expert}.{name}.weight_packed"] = pack(codes)
            # The codes' root mean square is 2.9; 2^-5 brings a row of some 64 to 96 weights near unit length.
            tensors[f"experts.{expert}.{name}.weight_scale"] = np.full((shape[0], shape[1] // 32), 122, np.uint8)
    return {f"block_sparse_moe.{name}": tensor for name, tensor in tensors.items()}


def tokens(count: int, hidden: int = 128) -> np.ndarray:
    return np.random.default_rng(3).standard_normal((count, hidden)).astype(np.float32).astype(BF16)


@pytest.mark.parametrize(
    ("recipe", "least", "most"), [("bf16", 2e-3, 8e-3), ("w4a8", 2e-2, 6e-2), ("w4a8_fp8", 2e-2, 6e-2)]
)
def test_what_a_recipe_costs(recipe: str, least: float, most: float) -> None:
    """bf16 was measured at 5e-3 on unit-normal tokens, the two 8-bit recipes at 4e-2, for the routed path."""
    tensors = random_layer()
    exact = reference.oracle_trace(Config(), tensors, tokens(64), recipe=recipe, mode="exact")
    rounded = reference.oracle_trace(Config(), tensors, tokens(64), recipe=recipe, ids=exact["expert_ids"])
    assert least < relative_l2(rounded["normed_latent"], exact["normed_latent"]) < most
    assert least / 2 < relative_l2(rounded["output"], exact["output"]) < most


def test_w4a16_has_the_numbers_of_bf16() -> None:
    traces = [reference.oracle_trace(Config(), random_layer(), tokens(9), recipe=name) for name in ("bf16", "w4a16")]
    for stage, values in traces[0].items():
        np.testing.assert_array_equal(values, traces[1][stage])


def test_chunks_of_weights_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reference.oracle_trace(Config(), random_layer(), tokens(5), recipe="w4a8")
    monkeypatch.setattr(reference, "CHUNK", 1000)
    parts = reference.oracle_trace(Config(), random_layer(), tokens(5), recipe="w4a8")
    for stage, values in whole.items():
        np.testing.assert_allclose(parts[stage], values, rtol=1e-2, err_msg=stage)
    assert relative_l2(parts["output"], whole["output"]) < 1e-4  # another order of summation may move a rounding


def test_equal_scores_go_to_the_lowest_ids() -> None:
    tensors = random_layer() | {
        "block_sparse_moe.gate.weight": np.zeros((8, 128), BF16),
        "block_sparse_moe.gate.e_score_correction_bias": np.array([0, 0, 1, 0, 1, 0, 0, 0], np.float32),
    }
    trace = reference.oracle_trace(Config(), tensors, tokens(3), recipe="bf16")
    assert trace["expert_ids"].tolist() == [[2, 4, 0, 1]] * 3
    np.testing.assert_allclose(trace["expert_weights"], 0.25)  # the bias chooses, it doesn't weigh


def test_only_the_best_groups_take_part() -> None:
    """Group scores, the sums of their two best: 0.9 + 0.1, 0.6 + 0.6, 0.8 + 0.0, 0.5 + 0.5; two of four groups stay."""
    bias = np.array([0.9, 0.1, 0.6, 0.6, 0.8, 0.0, 0.5, 0.49], np.float32)
    tensors = random_layer() | {
        "block_sparse_moe.gate.weight": np.zeros((8, 128), BF16),
        "block_sparse_moe.gate.e_score_correction_bias": bias,
    }
    config = Config(num_experts_per_token=3, num_expert_group=4, topk_group=2)
    assert reference.oracle_trace(config, tensors, tokens(1), recipe="bf16")["expert_ids"].tolist() == [[0, 2, 3]]
    ungrouped = replace(config, num_expert_group=1, topk_group=1)
    assert reference.oracle_trace(ungrouped, tensors, tokens(1), recipe="bf16")["expert_ids"].tolist() == [[0, 4, 2]]


def test_weights_follow_the_config() -> None:
    tensors, x = random_layer(), tokens(4)
    logits = x.astype(float) @ tensors["block_sparse_moe.gate.weight"].astype(float).T
    scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    config = Config(router_activation="softmax", renormalize=False, routed_scaling_factor=2.5)
    trace = reference.oracle_trace(config, tensors, x, recipe="bf16")
    picked = np.take_along_axis(scores, trace["expert_ids"], axis=1)
    np.testing.assert_allclose(trace["expert_weights"], 2.5 * picked, rtol=1e-12)
    renormalised = reference.oracle_trace(replace(config, renormalize=True), tensors, x, recipe="bf16")
    np.testing.assert_allclose(renormalised["expert_weights"].sum(axis=1), 2.5, rtol=1e-12)
    with pytest.raises(NotImplementedError, match="tanh"):
        reference.oracle_trace(Config(router_activation="tanh"), tensors, x, recipe="bf16")


def test_given_ids_replace_the_picks_in_every_later_stage() -> None:
    tensors, x = random_layer(), tokens(2)
    own = reference.oracle_trace(Config(), tensors, x, recipe="bf16")
    given_ids = np.array([[3, 3], [-1, 2]], np.int32)  # the same expert twice counts twice; -1 counts for nothing
    trace = reference.oracle_trace(Config(), tensors, x, recipe="bf16", ids=given_ids)
    np.testing.assert_array_equal(trace["expert_ids"], own["expert_ids"])
    np.testing.assert_allclose(trace["expert_weights"], np.array([[0.5, 0.5], [0, 1]]))
    for token, expert in enumerate((3, 2)):
        alone = reference.expert_rows(Config(), tensors, expert, trace["latent"][token : token + 1], recipe="bf16")
        np.testing.assert_array_equal(trace["expert_sum"][token], alone[0])


def test_a_masked_token_is_routed_to_nothing() -> None:
    tensors, x = random_layer(), tokens(3)
    free = reference.oracle_trace(Config(), tensors, x, recipe="w4a8")
    masked = reference.oracle_trace(Config(), tensors, x, recipe="w4a8", mask=np.array([True, False, True]))
    assert masked["expert_ids"][1].tolist() == [-1] * 4
    for stage in ("expert_weights", "expert_sum", "normed_latent"):
        assert not np.any(masked[stage][1])
    np.testing.assert_array_equal(masked["output"][1], masked["shared"][1])
    np.testing.assert_array_equal(masked["output"][[0, 2]], free["output"][[0, 2]])


def test_parts_that_a_layer_lacks_are_absent() -> None:
    tensors = {name: tensor for name, tensor in random_layer(latent=64, hidden=64).items() if "shared" not in name}
    x = tokens(3, hidden=64)
    no_norm = {name: tensor for name, tensor in tensors.items() if "norm" not in name}
    trace = reference.oracle_trace(Config(), no_norm, x, recipe="bf16")
    assert not trace.keys() & {"normed_latent", "shared"}
    no_latent = {name: tensor for name, tensor in no_norm.items() if "routed_expert" not in name}
    trace = reference.oracle_trace(Config(), no_latent, x, recipe="bf16")
    assert not trace.keys() & {"latent", "normed_latent", "shared"}
    np.testing.assert_array_equal(trace["output"], trace["expert_sum"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_plain_experts_are_rounded_as_loading_rounds_them(recipe: str) -> None:
    """bf16 keeps plain experts in bf16; every other recipe packs them, which is exact for weights that were packed."""
    tensors = random_layer()
    plain = dict(tensors)
    for name in [name for name in tensors if name.endswith("weight_packed")]:
        base = name.removesuffix("_packed")
        plain[base] = formats.decode_mxfp4(plain.pop(name), plain.pop(f"{base}_scale")).astype(np.float32)
    packed_trace = reference.oracle_trace(Config(), tensors, tokens(5), recipe=recipe)
    plain_trace = reference.oracle_trace(Config(), plain, tokens(5), recipe=recipe)
    np.testing.assert_array_equal(plain_trace["output"], packed_trace["output"])

    fine = "block_sparse_moe.experts.0.w1.weight"
    plain[fine] = np.full_like(plain[fine], 1 + 2.0**-7 + 2.0**-12)
    rows = np.ones((1, 64))
    rounded = plain | {fine: np.full_like(plain[fine], 1 + 2.0**-7 if recipe == "bf16" else 1.0)}
    modes: dict[Mode, bool] = {"oracle": True, "exact": False}
    for mode, same in modes.items():
        a, b = (reference.expert_rows(Config(), t, 0, rows, recipe=recipe, mode=mode) for t in (plain, rounded))
        assert np.array_equal(a, b) == same


def test_a_dense_layer_is_its_gated_mlp() -> None:
    shared = {name: tensor for name, tensor in random_layer().items() if "shared" in name}
    dense = {name.replace("block_sparse_moe.shared_experts", "mlp"): tensor for name, tensor in shared.items()}
    trace = reference.oracle_trace(Config(), dense, tokens(6), recipe="w4a8")
    assert trace.keys() == {"output"}
    expected = reference.oracle_trace(Config(), random_layer(), tokens(6), recipe="w4a8")["shared"]
    np.testing.assert_array_equal(trace["output"], expected)


def test_no_tokens() -> None:
    trace = reference.oracle_trace(Config(), random_layer(), tokens(0), recipe="w4a8")
    assert {name: values.shape for name, values in trace.items()} == {
        "router_logits": (0, 8),
        "expert_scores": (0, 8),
        "expert_ids": (0, 4),
        "expert_weights": (0, 4),
        "latent": (0, 64),
        "expert_sum": (0, 64),
        "normed_latent": (0, 64),
        "shared": (0, 128),
        "output": (0, 128),
    }


def test_what_it_refuses() -> None:
    tensors, x = random_layer(), tokens(2)
    with pytest.raises(ValueError, match=r"recipe 'fp4' is unknown.*w4a8_fp8"):
        reference.oracle_trace(Config(), tensors, x, recipe="fp4")
    with pytest.raises(ValueError, match=r"shape \(1, 2, 128\)"):
        reference.oracle_trace(Config(), tensors, x[None], recipe="bf16")
    with pytest.raises(ValueError, match="T = 2"):
        reference.oracle_trace(Config(), tensors, x, recipe="bf16", ids=np.zeros((3, 4), np.int32))
    with pytest.raises(ValueError, match=r"0 \.\.\. 8"):
        reference.oracle_trace(Config(), tensors, x, recipe="bf16", ids=np.array([[0], [8]], np.int32))
