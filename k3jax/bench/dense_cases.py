"""A layer's dense products as `k3jax bench` times them, as plain data: sizes, and the floor's bytes and operations.

NumPy only, like `cases`.
"""

import dataclasses
from typing import ClassVar

from k3jax.bench.cases import HIDDEN, WEIGHT_BYTES, WIDTH
from k3jax.bench.layer_cases import MODEL, SHARED

GATED = ("shared_gate_up", "mlp_gate_up")
DENSE_OPS = ("latent_down", "latent_up", "shared_gate_up", "shared_down", "mlp_gate_up", "mlp_down")
INTERMEDIATE = 33792  # `intermediate_size` of the release's config, which only layer 0 has use for


@dataclasses.dataclass(frozen=True)
class DenseCase:
    """One row of the table: bfloat16 `[rows, depth] x [columns, depth]`, of GATED with SiTU, to bfloat16.

    Attributes:
        model: D. hidden: L, a latent's length. width: F of an expert. shared: how many shared experts are one MLP.
        intermediate: F of layer 0's MLP.
    """

    recipe: ClassVar[str] = "bf16"
    groups: ClassVar[None] = None  # one matrix has all rows
    distribution: ClassVar[None] = None
    experts_hit: ClassVar[None] = None

    op: str
    rows: int
    model: int = MODEL
    hidden: int = HIDDEN
    width: int = WIDTH
    shared: int = SHARED
    intermediate: int = INTERMEDIATE
    seed: int = 0

    @property
    def gated(self) -> bool:
        """Whether gate and up are multiplied, and SiTU follows."""
        return self.op in GATED

    @property
    def weight(self) -> tuple[int, int]:
        """N and K of the weight, gate and up counted."""
        return {
            "latent_down": (self.hidden, self.model),
            "latent_up": (self.model, self.hidden),
            "shared_gate_up": (2 * self.shared * self.width, self.model),
            "shared_down": (self.model, self.shared * self.width),
            "mlp_gate_up": (2 * self.intermediate, self.model),
            "mlp_down": (self.model, self.intermediate),
        }[self.op]

    @property
    def columns(self) -> int:
        """N of the product, gate and up counted."""
        return self.weight[0]

    @property
    def depth(self) -> int:
        """K of the product."""
        return self.weight[1]

    @property
    def flop(self) -> float:
        """Operations of the product."""
        return 2.0 * self.rows * self.columns * self.depth

    @property
    def weight_bytes(self) -> float:
        return self.columns * self.depth * WEIGHT_BYTES[self.recipe]

    @property
    def bytes(self) -> float:
        """The fewest bytes to move: the weight and each row read once, each result written once."""
        result = self.columns // 2 if self.gated else self.columns
        return self.weight_bytes + 2.0 * self.rows * (self.depth + result)
