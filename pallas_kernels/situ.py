"""The two gated activations, SiTU and SwiGLU, and their application to a fused `[gate | up]` array.

    SiTU(gate, up)   = [beta * tanh(gate / beta) * sigmoid(gate)] * [linear_beta * tanh(up / linear_beta)]
    SwiGLU(gate, up) = [gate * sigmoid(gate)] * up

SiTU is SwiGLU with both factors bounded: `|SiTU| <= beta * linear_beta`. The sigmoid sees the raw gate. A `linear_beta`
of None leaves the up factor as it is (it does not mean 1). Both are computed in float32 with one rounding at the end.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import row_kernels, select
from pallas_kernels.rounding import to_bfloat16

_SMALLEST_BETA = float(jnp.finfo(jnp.float32).tiny)
_LARGEST_BETA = float(jnp.finfo(jnp.float32).max)


@dataclasses.dataclass(frozen=True)
class Situ:
    """Kimi K3's activation, callable on float32 `gate` and `up` of one shape; hashable, so a compile-time choice.

    Raises:
        ValueError: a beta is not a number that is positive, finite and normal in float32. (The official code reads a
            beta of 0 or None as 1 and checks nothing; a checkpoint that relies on that is more likely to be broken.)
    """

    beta: float
    linear_beta: float | None

    def __post_init__(self) -> None:
        for name, value in (("beta", self.beta), ("linear_beta", self.linear_beta)):
            if value is None and name == "linear_beta":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(
                    f"Situ: {name}={value!r} must be a number, such as Kimi K3's beta=4.0, linear_beta=25.0"
                )
            if not _SMALLEST_BETA <= value <= _LARGEST_BETA:
                raise ValueError(f"Situ: {name}={value!r} must be positive and finite, as a normal float32")

    def __call__(self, gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
        bounded_gate = self.beta * jnp.tanh(gate / self.beta) * jax.nn.sigmoid(gate)
        return bounded_gate * (up if self.linear_beta is None else self.linear_beta * jnp.tanh(up / self.linear_beta))


@dataclasses.dataclass(frozen=True)
class SwiGLU:
    """`gate * sigmoid(gate) * up`, callable on float32 `gate` and `up` of one shape."""

    def __call__(self, gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
        return gate * jax.nn.sigmoid(gate) * up


Activation = Situ | SwiGLU


def apply_activation(activation: Activation, gate_up: Float[Array, "... two_f"]) -> Float[Array, "... f"]:
    """`activation(gate, up)` for `gate_up [..., 2F]` whose first half is the gate: `[..., F]`, in `gate_up`'s dtype.

    Raises:
        ValueError: the last axis is odd.
    """
    _require_halves(gate_up)
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    y = activation(gate, up)
    return to_bfloat16(y) if gate_up.dtype == jnp.bfloat16 else y.astype(gate_up.dtype)


def _require_halves(gate_up: Array) -> None:
    if gate_up.ndim < 1 or gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up has shape {gate_up.shape}; its last axis must hold gate and up, so be even")


def situ_and_mul(
    gate_up: Float[Array, "... two_f"],
    *,
    beta: float,
    linear_beta: float | None,
    implementation: str | None = None,
) -> Float[Array, "... f"]:
    """SiTU of a fused array: `[..., 2F]` of any float dtype -> `[..., F]` of the same dtype; float32 inside.

    Both betas are required, because a default would hide a checkpoint that lacks them (Kimi K3's are 4 and 25).
    `implementation` is "reference" or "xla" (the same formula, which XLA fuses into one pass), "mosaic" (Hopper
    and Blackwell, bfloat16), "triton" (NVIDIA GPUs from Ampere on) or None for the fastest that can.

    Raises:
        ValueError: a beta is not positive and finite, the last axis is odd, or no such implementation exists.
        NotImplementedError: the named implementation cannot run this here.
    """
    return _apply("situ_and_mul", Situ(beta, linear_beta), gate_up, implementation)


def swiglu_and_mul(gate_up: Float[Array, "... two_f"], *, implementation: str | None = None) -> Float[Array, "... f"]:
    """SwiGLU of a fused array: the same contract as `situ_and_mul`, without betas."""
    return _apply("swiglu_and_mul", SwiGLU(), gate_up, implementation)


def _apply(op: str, activation: Activation, gate_up: Array, implementation: str | None) -> Array:
    _require_halves(gate_up)
    chosen = select.choose(op, implementation, x=gate_up)
    if chosen not in row_kernels.IMPLEMENTATIONS:
        return apply_activation(activation, gate_up)
    return row_kernels.of(chosen).gated(activation, gate_up)
