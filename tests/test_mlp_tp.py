"""The rule that splits a dense layer's MLP, on worked examples."""

import pytest

from sharding.mlp_tp import mlp_tp


@pytest.mark.parametrize(
    ("attention_dp", "tp", "gpus_per_node", "intermediate_size", "shards"),
    [
        (True, 8, 8, 516, 1),
        (False, 8, 8, 512, 8),
        (False, 8, 8, 516, 4),
        (False, 8, 8, 515, 1),
        (False, 16, 8, 512, 8),
        (False, 12, 8, 512, 4),
        (False, 72, 8, 33792, 8),
        (False, 6, 4, 36, 2),  # six shards are more than a node's four GPUs, and four do not divide six
        (False, 1, 8, 33792, 1),
    ],
)
def test_shards(attention_dp: bool, tp: int, gpus_per_node: int, intermediate_size: int, shards: int) -> None:
    assert mlp_tp(attention_dp, tp, gpus_per_node, intermediate_size) == shards
    assert intermediate_size % shards == 0
    assert tp % shards == 0


@pytest.mark.parametrize("sizes", [(0, 8, 512), (8, 0, 512), (8, 8, 0)])
def test_sizes_are_positive(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"mlp_tp: \w+=0 must be positive"):
        mlp_tp(False, *sizes)
