"""How long a step of healing takes, and how much of it is the forward pass."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from k3jax.healing.loss import distillation_loss
from k3jax.healing.pairs import Pairs
from k3jax.healing.step import make_step, split, start
from k3jax.healing.training import Plan, batch_at, power_of
from k3jax.mlp import GatedMLP
from k3jax.moe import MoE


@dataclass(frozen=True)
class StepTimes:
    """Medians over `repeats`, in seconds: a whole step, and the loss alone over the same micro-batches."""

    step: float
    forward: float
    repeats: int
    tokens_per_second: float

    @property
    def forward_share(self) -> float:
        """Of the step's time."""
        return self.forward / self.step


def time_steps(layer: GatedMLP | MoE, pairs: Pairs, plan: Plan, repeats: int) -> StepTimes:
    """Times steps on one batch that is on the device already, from an idle device to their results."""
    student, params, frozen = split(layer)
    optimizer = plan.schedule.optimizer()
    power = power_of(pairs)
    batch = jax.device_put(batch_at(pairs, plan, 0))

    @jax.jit
    def forward(params: Any, frozen: Any, batch: Any) -> Any:
        def one(micro: Any) -> Any:
            return distillation_loss(student.layer(params, frozen), micro, power, plan.loss)[0]

        return jax.lax.map(one, batch)

    forward_seconds = _median(lambda: forward(params, frozen, batch), repeats)
    step, state = make_step(student, optimizer, power, plan.loss), start(params, optimizer)

    def one_step() -> Any:
        nonlocal state
        state, numbers = step(state, frozen, batch)
        return state, numbers

    step_seconds = _median(one_step, repeats)
    return StepTimes(step_seconds, forward_seconds, repeats, plan.batch / step_seconds)


def _median(call: Callable[[], Any], repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 1):  # the first compiles
        began = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])
