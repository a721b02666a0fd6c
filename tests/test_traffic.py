"""The model of what moving rows costs, against counts of random routings and numbers worked out by hand."""

import math

import numpy as np
import pytest

from sharding.traffic import TRANSPORTS, Exchange, Fabric, all_reduce_bytes, copies, crossover_tokens, seconds

NODE = Fabric(node=8, link=450e9, network=50e9)


def kimi(ranks: int, **formats: str) -> Exchange:
    return Exchange(num_experts=896, picks=16, columns=3584, ranks=ranks, **formats)


@pytest.mark.parametrize(
    ("ranks", "probability", "per_rank", "per_expert", "all_gather"),
    [(8, 0.884, 6.2, 14, 7), (32, 0.401, 12.4, 15.5, 31)],
)
def test_rows_a_token(ranks: int, probability: float, per_rank: float, per_expert: float, all_gather: float) -> None:
    exchange = kimi(ranks)
    assert round(exchange.hit_probability, 3) == probability
    assert round(exchange.rows("per_rank"), 1) == per_rank
    assert exchange.rows("per_expert") == per_expert
    assert exchange.rows("all_gather") == all_gather


@pytest.mark.parametrize(("num_experts", "picks", "ranks"), [(896, 16, 8), (896, 16, 64), (12, 4, 3), (6, 6, 2)])
def test_rows_are_what_random_routings_need(num_experts: int, picks: int, ranks: int) -> None:
    rng = np.random.default_rng(num_experts + ranks)
    tokens = 4000
    ids = rng.permuted(np.tile(np.arange(num_experts), (tokens, 1)), axis=1)[:, :picks]
    rank = ids // (num_experts // ranks)
    hit = np.zeros((tokens, ranks), np.bool_)
    hit[np.arange(tokens)[:, None], rank] = True
    own = rng.integers(ranks, size=tokens)
    hit[np.arange(tokens), own] = False
    exchange = Exchange(num_experts, picks, 32, ranks)
    spread = 4 * np.sqrt(ranks / tokens)
    assert hit.sum() / tokens == pytest.approx(exchange.rows("per_rank"), abs=spread)
    assert (rank != own[:, None]).sum() / tokens == pytest.approx(exchange.rows("per_expert"), abs=spread)


def test_copies_of_a_given_routing() -> None:
    """Two tokens a rank, counted token by token."""
    ids = np.array([[0, 1, 2], [0, 3, 4], [9, 10, 11], [-1, -1, -1], [0, 0, 3], [6, 7, 0], [9, 0, 3]])
    holders = np.where(ids >= 0, ids // 3, -1)
    expected = np.zeros((4, 4), np.int64)
    for token, of_token in enumerate(holders.tolist()):
        for holder in {*of_token} - {-1, token // 2}:
            expected[token // 2, holder] += 1
    np.testing.assert_array_equal(copies(holders, 2, 4), expected)


def test_a_random_routing_sends_what_the_model_expects() -> None:
    rng = np.random.default_rng(1)
    ids = rng.permuted(np.tile(np.arange(896), (800, 1)), axis=1)[:, :16]
    assert copies(ids // 112, 100, 8).sum() / 800 == pytest.approx(kimi(8).rows("per_rank"), rel=0.02)


def test_one_rank_sends_nothing() -> None:
    assert [kimi(1).bytes(transport) for transport in TRANSPORTS] == [0, 0, 0]


def test_a_rank_is_sent_at_most_what_everyone_is() -> None:
    for ranks in (2, 4, 7, 8, 14, 16, 28, 32, 56, 64, 112, 128, 224, 448, 896):
        exchange = kimi(ranks)
        assert exchange.rows("per_rank") <= min(exchange.rows("all_gather"), exchange.rows("per_expert"))
    assert kimi(896).rows("per_rank") == pytest.approx(kimi(896).rows("per_expert"))  # an expert a rank: the same


def test_bytes_of_a_row() -> None:
    assert kimi(8).out_row == 2 * 3584 + 16 * 8
    assert kimi(8, out="mxfp8").out_row == 3584 + 3584 // 32 + 16 * 8
    assert (kimi(8).back_row, kimi(8, back="f32").back_row) == (7168, 14336)
    assert kimi(8).bytes("all_gather") == 7 * (7168 + 128 + 7168)


def test_seconds_on_a_node_and_across_nodes() -> None:
    row = 7168 + 128 + 7168
    assert seconds(kimi(8), "all_gather", NODE) == pytest.approx(7 * row / 450e9)
    assert seconds(kimi(8), "per_rank", NODE) == pytest.approx(kimi(8).rows("per_rank") * row / 450e9)
    # Over four nodes a ring carries every row past each node once, over its eight ports; single copies take one port.
    assert seconds(kimi(32), "all_gather", NODE) == pytest.approx(31 * row / (8 * 50e9))
    assert seconds(kimi(32), "per_rank", NODE) == pytest.approx(24 * kimi(32).hit_probability * row / 50e9)


def test_the_crossover() -> None:
    saved = (7 - kimi(8).rows("per_rank")) * (7168 + 128 + 7168) / 450e9
    assert crossover_tokens(kimi(8), NODE, 20e-6) == pytest.approx(20e-6 / saved)
    assert crossover_tokens(kimi(32), NODE, 20e-6) == math.inf
    assert crossover_tokens(kimi(64), Fabric(72, 900e9, 50e9), 20e-6) < 64


def test_the_all_reduce_of_replicated_tokens() -> None:
    assert all_reduce_bytes(7168 + 3584, 8) == 2 * 7 / 8 * 10752 * 2
    assert all_reduce_bytes(10752, 1) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 72}, "896 experts cannot be split evenly over ranks=72"),
        ({"ranks": 0}, "cannot be split evenly over ranks=0"),
        ({"picks": 897}, "picks=897 must be between 1 and 896"),
        ({"out": "fp6"}, "format 'fp6' is not one of bf16"),
    ],
)
def test_impossible_exchanges(change: dict, message: str) -> None:
    sizes = {"num_experts": 896, "picks": 16, "columns": 3584, "ranks": 8}
    with pytest.raises(ValueError, match=message):
        Exchange(**(sizes | change))
