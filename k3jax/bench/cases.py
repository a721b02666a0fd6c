"""What `k3jax bench` times, as plain data: sizes, rows of each expert, and the bytes and operations of the floor.

NumPy only, and nothing of this package: `scripts/humming_peer` loads this one file where there is no JAX.
"""

import dataclasses

import numpy as np

GEMMS = ("w13", "w2")
OPS = (*GEMMS, "situ", "quantize", "schedule", "gather", "combine", "layer")
RECIPES = ("bf16", "w4a16", "w4a8", "w4a8_fp8")
DISTRIBUTIONS = ("uniform", "zipf", "hot")

# Kimi K3's routed experts, and the share of them that one of eight devices holds.
HIDDEN = 3584
WIDTH = 3072
PICKS = 16
GROUPS = 112
ROWS = (128, 2048, 16384, 65536)

WEIGHT_BYTES = {"bf16": 2.0, "w4a16": 17 / 32, "w4a8": 17 / 32, "w4a8_fp8": 17 / 32}  # of one weight, scales included
RATES = {"bf16": "bf16", "w4a16": "bf16", "w4a8": "bf16", "w4a8_fp8": "fp8"}  # the tensor cores that a recipe can use


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table.

    w13 is `[rows, hidden] x [groups, 2 * width, hidden]` with SiTU, w2 `[rows, width] x [groups, hidden, width]`, situ
    `[rows, 2 * width] -> [rows, width]`, and quantize takes bfloat16 `[rows, hidden]` to the rows of `recipe`. gather
    makes those rows out of as many tokens as have `picks` each, combine adds them up to float32 tokens, and schedule
    sorts them by expert.
    """

    op: str
    recipe: str
    rows: int
    groups: int | None = GROUPS
    distribution: str | None = "uniform"
    hidden: int = HIDDEN
    width: int = WIDTH
    seed: int = 0
    picks: int = PICKS

    @property
    def tokens(self) -> int:
        """Of schedule, gather and combine."""
        return self.rows // self.picks

    @property
    def gated(self) -> bool:
        """Whether gate and up are multiplied, and SiTU follows."""
        return self.op == "w13"

    @property
    def depth(self) -> int:
        """K of a product; the length of a row of the other ops' input."""
        return {"w2": self.width, "situ": 2 * self.width}.get(self.op, self.hidden)

    @property
    def columns(self) -> int:
        """N of a product, gate and up counted."""
        return 2 * self.width if self.gated else self.hidden

    @property
    def group_sizes(self) -> np.ndarray:
        """Rows of each expert, int32 `[groups]`."""
        assert self.groups is not None
        assert self.distribution is not None
        return group_sizes(self.rows, self.groups, self.distribution, self.seed)

    @property
    def experts_hit(self) -> int | None:
        """How many have rows; None for the ops without experts."""
        return int(np.count_nonzero(self.group_sizes)) if self.op in GEMMS else None

    @property
    def flop(self) -> float:
        """Operations of the product; nothing for the ops that only move numbers."""
        return 2.0 * self.rows * self.columns * self.depth if self.op in GEMMS else 0.0

    @property
    def weight_bytes(self) -> float:
        """Bytes of the experts that have rows."""
        return (self.experts_hit or 0) * self.columns * self.depth * WEIGHT_BYTES[self.recipe]

    @property
    def bytes(self) -> float:
        """The fewest bytes to move: the weights of `weight_bytes`, each row read once, each result written once."""
        if self.op == "situ":
            return 2.0 * self.rows * (self.depth + self.width)
        if self.op == "quantize":
            return self.rows * (2.0 * self.depth + quantised_row_bytes(self.recipe, self.depth))
        if self.op == "schedule":
            return schedule_bytes(self.rows, GROUPS)
        if self.op == "gather":
            return gather_bytes(self.tokens, self.rows, 2.0 * self.hidden)
        if self.op == "combine":
            return combine_bytes(self.tokens, self.rows, self.hidden)
        result = self.width if self.gated else self.hidden
        return self.weight_bytes + self.rows * (quantised_row_bytes(self.recipe, self.depth) + 2.0 * result)


def schedule_bytes(rows: int, groups: int) -> float:
    """Of the group and the place of each slot, the token of each row, and the size of each group."""
    return 12.0 * rows + 4.0 * groups


def gather_bytes(tokens: int, rows: int, row_bytes: float) -> float:
    """Of tokens read once, a place for each of their rows, and rows."""
    return (tokens + rows) * row_bytes + 4.0 * rows


def combine_bytes(tokens: int, rows: int, hidden: int) -> float:
    """Of bfloat16 rows, a place and a weight for each, and float32 sums."""
    return rows * (2.0 * hidden + 8.0) + 4.0 * tokens * hidden


def quantised_row_bytes(recipe: str, length: int) -> float:
    """Of a row as the recipe's products read it, scales included."""
    if recipe in ("bf16", "w4a16"):
        return 2.0 * length
    return length + (4.0 if recipe == "w4a8_fp8" else length / 32)


def group_sizes(rows: int, groups: int, distribution: str, seed: int = 0) -> np.ndarray:
    """How `rows` fall on `groups` experts: int32 `[groups]` that sum to `rows`, the same for the same arguments.

    uniform: as evenly as possible. zipf: in proportion to 1, 1/2, 1/3, ... over shuffled experts, by largest remainder.
    hot: half of the rows on one expert, the rest evenly on the others.

    Raises:
        ValueError: no such distribution, fewer than one group or a negative number of rows.
    """
    if groups < 1 or rows < 0:
        raise ValueError(f"{rows} rows over {groups} groups: at least 0 rows and 1 group are needed")
    rng = np.random.default_rng(seed)
    if distribution == "uniform":
        return _evenly(rows, groups)
    if distribution == "zipf":
        share = rng.permutation(1 / np.arange(1, groups + 1))
        exact = rows * share / share.sum()
        sizes = np.floor(exact).astype(np.int32)
        sizes[np.argsort(sizes - exact, kind="stable")[: rows - sizes.sum()]] += 1
        return sizes
    if distribution == "hot":
        hot = rows - rows // 2 if groups > 1 else rows
        return np.insert(_evenly(rows - hot, groups - 1), rng.integers(groups), hot).astype(np.int32)
    raise ValueError(f"distribution={distribution!r} is not one of {', '.join(DISTRIBUTIONS)}")


def even_picks(tokens: int, picks: int, groups: int, seed: int = 0) -> np.ndarray:
    """Distinct experts of each token, int32 `[tokens, picks]`, which fall on all of `groups` as evenly as can be."""
    experts = np.random.default_rng(seed).permutation(groups)
    return experts[np.arange(tokens * picks) % groups].reshape(tokens, picks).astype(np.int32)


def _evenly(rows: int, groups: int) -> np.ndarray:
    return np.array([rows // groups + (g < rows % groups) for g in range(groups)], np.int32)
