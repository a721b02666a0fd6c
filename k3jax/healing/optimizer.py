"""The optimiser of healing: AdamW with clipping, a warm-up and a cosine, over float32 master weights."""

from dataclasses import dataclass

import jax
import optax


def usual_rate(hidden_size: int) -> float:
    """A learning rate for layers of that width: 4.9e-3 at 512, 3.5e-4 at 7168.

    AdamW moves every element by about the rate a step, those of a row together: a product with a unit-normal token of
    `hidden_size` elements moves by up to that many times the rate, whatever the elements' own size.
    """
    return 2.5 / hidden_size


@dataclass(frozen=True)
class Schedule:
    """AdamW's settings; the learning rate rises over `warmup` steps and falls along a cosine to a tenth at `steps`.

    Raises:
        ValueError: a number is out of its range.
    """

    steps: int
    learning_rate: float = 1e-3
    warmup: int = 10
    weight_decay: float = 0.0
    clip: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.99

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 <= self.warmup < self.steps:
            raise ValueError(f"steps={self.steps} must be at least 1, and warmup={self.warmup} less")
        if not self.learning_rate > 0 or not self.clip > 0 or not self.weight_decay >= 0:
            raise ValueError(
                f"learning_rate={self.learning_rate} and clip={self.clip} must be positive, "
                f"weight_decay={self.weight_decay} not negative"
            )
        if not 0 <= self.beta1 < 1 or not 0 <= self.beta2 < 1:
            raise ValueError(f"beta1={self.beta1} and beta2={self.beta2} must lie in [0, 1)")

    def rate(self) -> optax.Schedule:
        """Step number -> learning rate."""
        peak = self.learning_rate
        return optax.warmup_cosine_decay_schedule(peak / (self.warmup + 1), peak, self.warmup, self.steps, peak / 10)

    def optimizer(self) -> optax.GradientTransformation:
        """Clipped to a global norm, then AdamW; only matrices decay."""
        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.adamw(
                self.rate(),
                self.beta1,
                self.beta2,
                weight_decay=self.weight_decay,
                mask=lambda params: jax.tree.map(lambda p: p.ndim >= 2, params),
            ),
        )
