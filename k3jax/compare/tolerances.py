"""How near a layer must come to the truth, as data: one table, looked up by what the truth is and by the recipe.

Relative L2 is `|ours - truth| / |truth|` over a whole array. No absolute tolerance appears anywhere: it would let a
stage of small numbers, or of zeros, pass.
"""

import dataclasses
from typing import Literal

Against = Literal["oracle", "exact", "official", "engine"]
AGAINST: dict[Against, str] = {
    "oracle": "float64 with the recipe's quantisation and the official rounding points",
    "exact": "float64 without any rounding: what the recipe costs",
    "official": "a capture that rounds where the official model rounds",
    "engine": "a capture of an engine that rounds elsewhere",
}


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of one comparison.

    Attributes:
        relative_l2: of the latent's experts, norm and output stages. plain_l2: of the stages that no recipe touches
            (latent, shared, and a dense layer's output).
        cosine: at least this, for the same stages.
        token_factor: no single token may be further off than this many times its stage's relative L2.
        nonzero: by how much the shares of non-zeros of ours and of the truth may differ.
        router_l2: of the router's logits and weights. Accumulating D = 7168 products in float32 costs about 3e-7;
            rounding the logits to bfloat16 costs 2e-3, and moves picks.
        picks: the share of (token, slot) pairs that must agree, as sets.
        close_picks: the same of the router's probe, made of tokens that barely choose, but never nearly tie.
        near_tie: picks whose biased scores differ by less than this may go either way: float32 can't tell them apart.
        activation_l2: of the activation probe.
        activation_relative_rms: the root mean square of its elements' *relative* errors, in which small values weigh
            as much as large ones; a few elements rounded to the neighbouring bfloat16 cost about 1e-4.
    """

    relative_l2: float
    plain_l2: float
    cosine: float
    router_l2: float = 1e-5
    token_factor: float = 10.0
    nonzero: float = 0.01
    picks: float = 0.9999
    close_picks: float = 1.0
    near_tie: float = 1e-6
    activation_l2: float = 1e-3
    activation_relative_rms: float = 1e-3

    def stage_l2(self, stage: str, *, dense: bool = False) -> float:
        """The relative L2 allowed to a stage of plain numbers: latent, experts, norm, shared or output."""
        return self.plain_l2 if dense or stage in ("latent", "shared") else self.relative_l2


_BF16_EXACT = Limits(relative_l2=8e-3, plain_l2=8e-3, cosine=0.9999)
_A8_EXACT = Limits(relative_l2=6e-2, plain_l2=8e-3, cosine=0.998)
_FP8_EXACT = Limits(relative_l2=8e-2, plain_l2=6e-2, cosine=0.997)
_BF16_ORACLE = Limits(relative_l2=4e-3, plain_l2=4e-3, cosine=0.9999)
_A8_ORACLE = Limits(relative_l2=6e-3, plain_l2=4e-3, cosine=0.9999)
_BF16_OFFICIAL = Limits(relative_l2=2e-3, plain_l2=2e-3, cosine=0.9999)
_ENGINE = Limits(relative_l2=6e-2, plain_l2=6e-2, cosine=0.998, router_l2=1e-3)

TOLERANCES: dict[tuple[Against, str], Limits] = {
    ("oracle", "bf16"): _BF16_ORACLE,
    ("oracle", "w4a16"): _BF16_ORACLE,
    ("oracle", "w4a8"): _A8_ORACLE,
    ("oracle", "w4a8_fp8"): _A8_ORACLE,
    ("exact", "bf16"): _BF16_EXACT,
    ("exact", "w4a16"): _BF16_EXACT,
    ("exact", "w4a8"): _A8_EXACT,
    ("exact", "w4a8_fp8"): _A8_EXACT,
    ("official", "bf16"): _BF16_OFFICIAL,
    ("official", "w4a16"): _BF16_ORACLE,
    ("official", "w4a8"): _A8_ORACLE,
    ("official", "w4a8_fp8"): _A8_ORACLE,
    ("engine", "bf16"): _ENGINE,
    ("engine", "w4a16"): _ENGINE,
    ("engine", "w4a8"): _ENGINE,
    ("engine", "w4a8_fp8"): _ENGINE,
}


_FP8: dict[str, dict[str, Limits]] = {
    "oracle": {recipe: found for (against, recipe), found in TOLERANCES.items() if against == "oracle"},
    "exact": dict.fromkeys(("bf16", "w4a16", "w4a8", "w4a8_fp8"), _FP8_EXACT),
}
"""With dense weights in e4m3: the oracle quantises them too, "exact" does not."""


def limits(against: Against, recipe: str, dense_weights: str = "bf16") -> Limits:
    """The limits for `recipe` against that kind of truth, with dense weights in "bf16" or "fp8".

    Raises:
        ValueError: one is unknown, or the truth is a capture and knows nothing of "fp8".
    """
    if dense_weights == "fp8":
        found = _FP8.get(against, {}).get(recipe)
        if found is None:
            raise ValueError(
                f"no tolerance for dense_weights='fp8' with {recipe=} {against=}; compare it with the oracle"
            )
        return found
    found = TOLERANCES.get((against, recipe))
    if found is None:
        recipes = dict.fromkeys(name for _, name in TOLERANCES)
        raise ValueError(
            f"no tolerance for {recipe=} {against=}; recipes are {', '.join(recipes)}, truths {', '.join(AGAINST)}"
        )
    return found
