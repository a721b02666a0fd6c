"""What a layer is healed on: tokens and what the teacher made of them, from a layer or from a capture file."""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from k3jax.compare.capture import Capture
from k3jax.mlp import GatedMLP
from k3jax.moe import MoE

CHUNK = 1024  # Tokens that a teacher sees at once.


@dataclass(frozen=True)
class Pairs:
    """Tokens and a teacher's stages of them, on the host.

    Attributes:
        x: `[N, D]`, as the layer reads them. output: `[N, D]`. normed_latent: `[N, L]`, or None where there is none.
    """

    x: np.ndarray
    output: np.ndarray
    normed_latent: np.ndarray | None

    def __len__(self) -> int:
        return len(self.x)

    def take(self, rows: np.ndarray | slice) -> "Pairs":
        """Some of them."""
        latent = None if self.normed_latent is None else self.normed_latent[rows]
        return Pairs(self.x[rows], self.output[rows], latent)

    def split(self, held_out: int) -> tuple["Pairs", "Pairs"]:
        """All but the last `held_out`, and those."""
        return self.take(slice(0, len(self) - held_out)), self.take(slice(len(self) - held_out, None))


def from_teacher(teacher: GatedMLP | MoE, x: np.ndarray) -> Pairs:
    """`x [N, D]` with what `teacher` makes of it, computed in chunks."""
    output, *latent = stages_of(teacher, x)
    return Pairs(x, output, latent[0] if latent else None)


def stages_of(layer: GatedMLP | MoE, x: np.ndarray) -> list[np.ndarray]:
    """The layer's output and, if it has one, normed latent of `x [N, D]`, on the host."""
    stages = [jax.device_get(_stages(layer, jnp.asarray(x[at : at + CHUNK]))) for at in range(0, len(x), CHUNK)]
    return [np.concatenate(column) for column in zip(*stages, strict=True)]


def from_capture(path: str | Path, layer: int) -> Pairs:
    """The input, output and, if it is there, normed latent of `layer` in a capture file.

    Raises:
        FileNotFoundError, ValueError: there is no such file, it is no capture, or it lacks the layer or its output.
    """
    capture = Capture.open(path)
    stages = capture.layers.get(layer)
    if stages is None:
        raise ValueError(f"{capture.path} has no layer {layer}; it has {', '.join(map(str, capture.layers))}")
    if "output" not in stages:
        raise ValueError(f"{capture.path}: layer {layer} lacks the stage output, which a student has to match")
    return Pairs(stages["input"], stages["output"], stages.get("normed_latent"))


def batch_rows(count: int, size: int, position: int, seed: int) -> np.ndarray:
    """The rows of batch number `position`, of `size` out of `count`: every epoch in an order of its own.

    A function of its arguments alone, so that the position is all that a resumed run has to know.
    """
    epoch, batch = divmod(position, count // size)
    order = np.random.default_rng([seed, 2, epoch]).permutation(count)
    return order[batch * size : (batch + 1) * size]


@nnx.jit
def _stages(teacher: GatedMLP | MoE, x: jax.Array) -> list[jax.Array]:
    trace = teacher.trace(x)
    return [trace[stage] for stage in ("output", "normed_latent") if stage in trace]
