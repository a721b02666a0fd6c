"""Over how many ranks a dense layer's MLP is split: TensorRT-LLM's rule, which other engines' layouts follow.

    1                                    under attention data parallelism: every rank has tokens of its own
    gcd(intermediate_size, tp)           else
    gcd(that, gpus_per_node)             where that is more than one node holds: its all-reduce stays within a node

Rank r of the `tp` holds shard `r % mlp_tp`: neighbours hold different shards, and `tp // mlp_tp` ranks hold the same.
"""

import math


def mlp_tp(attention_dp: bool, tp: int, gpus_per_node: int, intermediate_size: int) -> int:
    """Into how many shards the MLP's width `intermediate_size` is cut; a divisor of it and of `tp`.

    Args:
        attention_dp: whether ranks have different tokens. tp: ranks that would share the MLP.

    Raises:
        ValueError: a size is not positive.
    """
    sizes = {"tp": tp, "gpus_per_node": gpus_per_node, "intermediate_size": intermediate_size}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"mlp_tp: {name}={size} must be positive")
    if attention_dp:
        return 1
    shards = math.gcd(intermediate_size, tp)
    return shards if shards <= gpus_per_node else math.gcd(shards, gpus_per_node)
