"""`GatedMLP`: `down(activation(gate(x), up(x)))`. A dense layer (layer 0), and the shared experts of the others."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, BFloat16, Bool, Float

from k3jax.linear import linear
from pallas_kernels import Activation
from pallas_kernels.rounding import to_bfloat16
from pallas_kernels.situ import apply_activation


class GatedMLP(nnx.Module):
    """Two projections around a gated activation, in bfloat16 with float32 sums; gate and up are one matmul.

    Args:
        gate_up: bfloat16 `[2F, D]`, the gate's rows first.
        down: bfloat16 `[D, F]`.
        activation: `Situ` or `SwiGLU`.

    Raises:
        ValueError: a dtype is not bfloat16, or the shapes do not belong together.
    """

    def __init__(self, gate_up: Float[Array, "..."], down: Float[Array, "..."], *, activation: Activation) -> None:
        if gate_up.ndim != 2 or gate_up.shape[0] % 2 or down.shape != (gate_up.shape[1], gate_up.shape[0] // 2):
            raise ValueError(f"GatedMLP: gate_up {gate_up.shape} must be [2F, D] and down {down.shape} [D, F]")
        for name, weight in (("gate_up", gate_up), ("down", down)):
            if weight.dtype != jnp.bfloat16:
                raise ValueError(f"GatedMLP: {name} must be bfloat16, not {weight.dtype}")
        self.gate_up = nnx.Param(gate_up)
        self.down = nnx.Param(down)
        self.activation = activation

    @classmethod
    def random(cls, hidden_size: int, width: int, *, activation: Activation, rngs: nnx.Rngs) -> "GatedMLP":
        """Random weights for `hidden_size` D and `width` F, of variance 1 / fan-in."""
        gate_up = random_weight(rngs, (2 * width, hidden_size))
        return cls(gate_up, random_weight(rngs, (hidden_size, width)), activation=activation)

    def __call__(self, x: Float[Array, "... d"], mask: Bool[Array, "..."] | None = None) -> Float[Array, "... d"]:
        """`[..., D] -> [..., D]` in the dtype of `x`, which is rounded to bfloat16 on entry.

        `mask` is there so that dense and MoE layers are called alike: it only says what not to route.
        """
        return self.trace(x, mask)["output"].reshape(x.shape)

    def trace(self, x: Float[Array, "... d"], mask: Bool[Array, "..."] | None = None) -> dict[str, Array]:
        """The stages over flattened tokens: only `output [T, D]`, in the dtype of `x`."""
        check_tokens(x, mask, self.down.shape[0])
        return {"output": self.project(to_bfloat16(x.reshape(-1, x.shape[-1]))).astype(x.dtype)}

    def project(self, x_TD: BFloat16[Array, "t d"]) -> BFloat16[Array, "t d"]:
        """The MLP itself: `[T, D] -> [T, D]`, bfloat16 in and out."""
        gate_up = linear(x_TD, self.gate_up[...])
        return linear(apply_activation(self.activation, gate_up), self.down[...])

    def activation_probe(self, gate: BFloat16[Array, " p"], up: BFloat16[Array, " p"]) -> BFloat16[Array, " p"]:
        """This layer's activation on given values of gate and up: `[P], [P] -> [P]`."""
        return apply_activation(self.activation, jnp.stack([gate, up], axis=-1))[:, 0]


def check_tokens(x: Array, mask: Array | None, hidden_size: int) -> None:
    """Raises ValueError unless `x` is `[..., D]` of a float dtype that a layer takes, and `mask` bool `[...]`."""
    if x.ndim < 1 or x.shape[-1] != hidden_size:
        raise ValueError(f"x has shape {x.shape}; its last axis must be hidden_size={hidden_size}")
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise ValueError(f"x is {x.dtype}; a layer takes bfloat16, float16 or float32")
    if mask is not None and (mask.shape != x.shape[:-1] or mask.dtype != jnp.bool_):
        raise ValueError(f"x {x.shape} needs a mask bool{list(x.shape[:-1])}, not {mask.dtype}{list(mask.shape)}")


def random_weight(rngs: nnx.Rngs, shape: tuple[int, ...]) -> Array:
    """bfloat16 normal values of variance 1 / `shape[-1]`, the fan-in."""
    return _random_weight(rngs.params(), shape)


@functools.partial(jax.jit, static_argnames=("shape",))
def _random_weight(key: Array, shape: tuple[int, ...]) -> Array:
    return (jax.random.normal(key, shape) * shape[-1] ** -0.5).astype(jnp.bfloat16)
