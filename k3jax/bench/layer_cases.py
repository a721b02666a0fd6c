"""The whole layer as `k3jax bench --op layer` times it, as plain data: its stages, and the least each has to do.

NumPy only, like `cases`.
"""

import dataclasses

from k3jax.bench.cases import (
    GROUPS,
    HIDDEN,
    PICKS,
    RATES,
    WEIGHT_BYTES,
    WIDTH,
    combine_bytes,
    gather_bytes,
    quantised_row_bytes,
    schedule_bytes,
)

TOKENS = (1, 8, 64, 256, 1024, 8192)
MODEL = 7168
SHARED = 2

GEMM_STAGES = ("w13", "w2")
ROUTED_STAGES = ("schedule", "quantize_tokens", "gather", "w13", "quantize_hidden", "w2", "combine")
STAGES = ("router", "latent_down", *ROUTED_STAGES, "norm_up", "shared")
"""In the order of the data. The two quantisers are there where the recipe has them."""

_ID, _FLOAT = 4, 4  # bytes
_BF16 = 2.0


@dataclasses.dataclass(frozen=True)
class LayerCase:
    """One layer on one device, and `tokens` rows of `[tokens, model]` for it.

    Attributes:
        groups: experts, all on this device. picks: of a token, spread evenly over them.
        model: D. hidden: L, an expert's row. width: F, of a routed and of a shared expert. shared: how many
            of the latter, which are one MLP.
    """

    recipe: str
    tokens: int
    groups: int = GROUPS
    picks: int = PICKS
    model: int = MODEL
    hidden: int = HIDDEN
    width: int = WIDTH
    shared: int = SHARED
    seed: int = 0

    @property
    def op(self) -> str:
        return "layer"

    @property
    def rows(self) -> int:
        """Routed rows: one for every token and pick."""
        return self.tokens * self.picks

    @property
    def shared_width(self) -> int:
        """Of the one MLP that all shared experts are."""
        return self.shared * self.width

    @property
    def stages(self) -> tuple[str, ...]:
        """Those that this layer has."""
        absent = set() if self.recipe in ("w4a8", "w4a8_fp8") else {"quantize_tokens", "quantize_hidden"}
        absent |= set() if self.shared else {"shared"}
        return tuple(stage for stage in STAGES if stage not in absent)


@dataclasses.dataclass(frozen=True)
class Work:
    """The least that something has to do: bytes of weights to read, bytes of everything else, and operations.

    `dense_flop` are of bfloat16 products; `expert_flop` of the experts', which eight-bit rows may make faster.
    """

    weight_bytes: float = 0.0
    other_bytes: float = 0.0
    dense_flop: float = 0.0
    expert_flop: float = 0.0

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.other_bytes

    @property
    def flop(self) -> float:
        return self.dense_flop + self.expert_flop

    def floor_us(self, recipe: str, ceilings: dict[str, float]) -> float:
        """Microseconds: its bytes at the read bandwidth or its operations at the products' rates, the longer."""
        products = self.dense_flop / ceilings["bf16"] + self.expert_flop / ceilings[RATES[recipe]]
        return max(self.bytes / ceilings["read"], products) * 1e6


def stage_work(case: LayerCase, experts_hit: int) -> dict[str, Work]:
    """What each stage of `case.stages` has to do when the rows are of `experts_hit` experts.

    Each input is counted once, though a gather reads a token for each of its picks, and each result once.
    """
    tokens, rows, experts = case.tokens, case.rows, case.groups
    model, hidden, width, shared = case.model, case.hidden, case.width, case.shared_width
    row = {length: quantised_row_bytes(case.recipe, length) for length in (hidden, width)}
    expert = WEIGHT_BYTES[case.recipe] * hidden * width  # one of an expert's three matrices
    latent = Work(_BF16 * model * hidden, _BF16 * tokens * (model + hidden), 2.0 * tokens * model * hidden)
    work = {
        "router": Work(
            experts * (_BF16 * model + _FLOAT),
            _BF16 * tokens * model + (_ID + _FLOAT) * rows,
            2.0 * tokens * experts * model,
        ),
        "latent_down": latent,
        "schedule": Work(other_bytes=schedule_bytes(rows, experts)),
        "quantize_tokens": Work(other_bytes=tokens * (_BF16 * hidden + row[hidden])),
        "gather": Work(other_bytes=gather_bytes(tokens, rows, row[hidden])),
        "w13": Work(
            experts_hit * 2 * expert,
            rows * (row[hidden] + _BF16 * width),
            expert_flop=4.0 * rows * hidden * width,
        ),
        "quantize_hidden": Work(other_bytes=rows * (_BF16 * width + row[width])),
        "w2": Work(experts_hit * expert, rows * (row[width] + _BF16 * hidden), expert_flop=2.0 * rows * hidden * width),
        "combine": Work(other_bytes=combine_bytes(tokens, rows, hidden)),
        "norm_up": Work(
            latent.weight_bytes + _BF16 * hidden, tokens * (_FLOAT * hidden + _BF16 * model), latent.dense_flop
        ),
        "shared": Work(3 * _BF16 * model * shared, 2 * _BF16 * tokens * model, 6.0 * tokens * model * shared),
    }
    return {stage: work[stage] for stage in case.stages}


def routed_work(case: LayerCase, experts_hit: int) -> Work:
    """What the routed path has to do, from ids and weights to the bfloat16 sums: nothing in between is moved."""
    stages = stage_work(case, experts_hit)
    return Work(
        sum(stages[stage].weight_bytes for stage in GEMM_STAGES),
        2 * _BF16 * case.tokens * case.hidden + (_ID + _FLOAT) * case.rows,
        expert_flop=sum(stages[stage].expert_flop for stage in GEMM_STAGES),
    )


def layer_work(case: LayerCase, experts_hit: int) -> Work:
    """What the layer has to do: every weight that it needs read once, its input read and its output written."""
    stages = stage_work(case, experts_hit).values()
    return Work(
        sum(work.weight_bytes for work in stages),
        2 * _BF16 * case.tokens * case.model,
        sum(work.dense_flop for work in stages),
        sum(work.expert_flop for work in stages),
    )
