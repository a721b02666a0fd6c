"""A run of healing: batches, steps, states on disk, and a report of how it goes. Deterministic, also after a resume."""

import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.healing.divergence import divergence
from k3jax.healing.loss import LossWeights, Power
from k3jax.healing.optimizer import Schedule
from k3jax.healing.pairs import Pairs, batch_rows, stages_of
from k3jax.healing.state_files import open_states
from k3jax.healing.step import Frozen, Params, Step, Student, make_step, split, start
from k3jax.mlp import GatedMLP
from k3jax.moe import MoE

Progress = Callable[[int, int, str], None]
History = list[dict[str, float]]


@dataclass(frozen=True)
class Plan:
    """What a run does, apart from its layer and its tokens.

    Attributes:
        batch: tokens a step. accumulate: micro-batches that a step's tokens are split into, one in memory at a time.
        seed: of the order of batches. save_every: steps between states on disk.
    """

    schedule: Schedule
    batch: int = 256
    accumulate: int = 1
    loss: LossWeights = field(default_factory=LossWeights)
    seed: int = 0
    save_every: int = 50

    def __post_init__(self) -> None:
        if self.accumulate < 1 or self.batch < 1 or self.batch % self.accumulate:
            raise ValueError(f"accumulate={self.accumulate} must divide batch={self.batch}")
        if self.save_every < 1:
            raise ValueError(f"save_every={self.save_every} must be at least 1")


@dataclass(frozen=True)
class Healed:
    """A run's result.

    Attributes:
        layer: after the last step; of a run that diverged, as its best state on disk has it, or as it was given.
        step: how many steps made that layer. history: each step's numbers.
        tokens_per_second: of this process's steps. diverged: why the run stopped early; None if it did not.
    """

    layer: Any
    step: int
    history: History
    tokens_per_second: float | None
    diverged: str | None


def relative_errors(layer: GatedMLP | MoE, pairs: Pairs) -> dict[str, float]:
    """The relative L2 of the layer's `output`, and of its `normed_latent` where the teacher's is known."""
    ours = stages_of(layer, pairs.x)
    theirs = [pairs.output, pairs.normed_latent]
    return {
        name: float(np.linalg.norm(_wide(a) - _wide(b)) / np.linalg.norm(_wide(b)))
        for name, a, b in zip(("output", "normed_latent"), ours, theirs, strict=False)
        if b is not None
    }


def train(
    layer: GatedMLP | MoE,
    pairs: Pairs,
    plan: Plan,
    *,
    states: Path | None = None,
    progress: Progress = lambda done, total, what: None,
) -> Healed:
    """Trains everything of `layer` but its packed experts and its router's bias to give `pairs.output` for `pairs.x`.

    Stops where `divergence` finds something wrong; such a state is never saved.

    Args:
        states: a folder for states to resume from; the run begins at the last one that it holds.
        progress: called after each step with steps done, steps in all, and the loss, the throughput and the time left.

    Raises:
        ValueError: there are fewer pairs than a batch, nothing trains, or `states` holds another run's states.
    """
    if len(pairs) < plan.batch:
        raise ValueError(f"batch={plan.batch} tokens are more than the {len(pairs)} to train on")
    student, params, frozen = split(layer)
    if not params:
        raise ValueError("nothing of this layer trains: its dense weights are in e4m3, and it has no router")
    step = _compiled_step(student, plan.schedule, power_of(pairs), plan.loss)
    described = _described(plan, pairs, params, frozen)
    state = start(params, plan.schedule.optimizer())
    history: History = []
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    with open_states(states, described) as files:
        if files is not None and files.last is not None:
            state = shapes  # Devices need not hold two.
            state, history = files.read(files.last, shapes)
        loop = _Loop(plan, history, progress)
        diverged = None
        while diverged is None and len(loop.history) < plan.schedule.steps:
            state, numbers = step(state, frozen, batch_at(pairs, plan, len(loop.history)))
            loop.made_step(numbers)
            diverged = divergence(loop.history)
            if files is not None and diverged is None and loop.is_to_save:
                files.save(state, loop.history, loop.recent_loss)
        if diverged is not None:
            state = shapes
            if files is None or files.best is None:
                return Healed(layer, 0, loop.history, loop.tokens_per_second, diverged)
            state, _ = files.read(files.best, shapes)
    healed = student.layer(state.params, frozen)
    return Healed(healed, int(state.step), loop.history, loop.tokens_per_second, diverged)


@functools.lru_cache(maxsize=2)
def _compiled_step(student: Student, schedule: Schedule, power: Power, loss: LossWeights) -> Step:
    """One for equal runs of a process, so that a resumed one need not compile again."""
    return make_step(student, schedule.optimizer(), power, loss)


class _Loop:
    """Keeps the history and tells how it goes. The first step, which compiles, counts for no throughput."""

    def __init__(self, plan: Plan, history: History, progress: Progress) -> None:
        self._plan = plan
        self.history = history
        self._progress = progress
        self._rate = plan.schedule.rate()
        self._began: float | None = None
        self._timed = 0

    @property
    def tokens_per_second(self) -> float | None:
        if self._began is None or not self._timed:
            return None
        return self._timed * self._plan.batch / (self._last - self._began)

    @property
    def is_to_save(self) -> bool:
        done = len(self.history)
        return done % self._plan.save_every == 0 or done == self._plan.schedule.steps

    @property
    def recent_loss(self) -> float:
        """The mean since the last state that was to be saved."""
        since = (len(self.history) - 1) // self._plan.save_every * self._plan.save_every
        return fmean(record["loss"] for record in self.history[since:])

    def made_step(self, numbers: dict[str, jax.Array]) -> None:
        done, steps = len(self.history), self._plan.schedule.steps
        record = {name: float(value) for name, value in sorted(numbers.items())}
        self.history.append({"learning_rate": float(self._rate(done))} | record)
        self._last = time.perf_counter()
        if self._began is None:
            self._began = self._last
        else:
            self._timed += 1
        text = f"relative L2 {record['output'] ** 0.5:.4f}"
        if (rate := self.tokens_per_second) is not None:
            left = (steps - done - 1) * self._plan.batch / rate
            text += f", {rate:,.0f} tokens/s, {left:,.0f} s left"
        self._progress(done + 1, steps, text)


def batch_at(pairs: Pairs, plan: Plan, position: int) -> dict[str, jax.Array]:
    """Batch number `position` as `[accumulate, tokens, ...]`."""
    some = pairs.take(batch_rows(len(pairs), plan.batch, position, plan.seed))
    arrays = {"x": some.x, "output": some.output}
    if some.normed_latent is not None:
        arrays["normed_latent"] = some.normed_latent
    return {name: jnp.asarray(a.reshape(plan.accumulate, -1, a.shape[1])) for name, a in arrays.items()}


def power_of(pairs: Pairs) -> Power:
    latent = pairs.normed_latent
    return Power(_mean_square(pairs.output), None if latent is None else _mean_square(latent))


def _mean_square(values: np.ndarray) -> float:
    return float(np.mean(np.sum(np.square(_wide(values)), axis=-1)))


def _wide(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float64)


def _described(plan: Plan, pairs: Pairs, params: Params, frozen: Frozen) -> dict[str, Any]:
    """What must be the same for a run to go on where another one stopped, as JSON values."""
    settings = dataclasses.asdict(plan)
    del settings["save_every"]
    return settings | {
        "tokens": len(pairs),
        "power": _mean_square(pairs.output),
        "weights": [int(total) for total in jax.tree.leaves(_sums_of_bits((params, frozen)))],
    }


@jax.jit
def _sums_of_bits(tree: Any) -> Any:
    """Of each array the sum of its words modulo 2^32: tells layers apart, in any order of summation."""
    words = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
    return jax.tree.map(
        lambda leaf: jnp.sum(jax.lax.bitcast_convert_type(leaf, words[leaf.dtype.itemsize]), dtype=jnp.uint32), tree
    )
