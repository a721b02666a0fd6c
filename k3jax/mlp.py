"""`GatedMLP`: `down(activation(gate(x), up(x)))`. A dense layer (layer 0), and the shared experts of the others."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, BFloat16, Bool, Float

from k3jax.linear import Weight, weight_variable
from k3jax.options import DEFAULTS, LoadOptions
from k3jax.parameters import parameter_specs, place_parameters
from pallas_kernels import Activation, FP8BlockArray, dense_matmul
from pallas_kernels.rounding import to_bfloat16
from pallas_kernels.situ import apply_activation
from sharding import Layout, Travel, make_mlp_layout


class GatedMLP(nnx.Module):
    """Two projections around a gated activation, in bfloat16 with float32 sums; gate and up are one matmul.

    Args:
        gate_up: bfloat16 `[2, F, D]`, the gate first, or an FP8BlockArray of that shape.
        down: bfloat16 `[D, F]`, or an FP8BlockArray.
        activation: `Situ` or `SwiGLU`.
        mesh: runs the layer over it, its width split over the mesh's ranks. Calls take and give global arrays.
        tokens: with a mesh, "replicated" or "sharded"; see `load_layer`. options: `wire`, `split_shared`.
        width_axis: the logical axis of the width: "mlp_ff", or "shared_ff" for the shared experts of an MoE layer.

    Raises:
        ValueError: a dtype is not bfloat16, the shapes do not belong together, or the mesh cannot split the width.
    """

    def __init__(
        self,
        gate_up: Weight,
        down: Weight,
        *,
        activation: Activation,
        mesh: Mesh | None = None,
        tokens: str = "replicated",
        options: LoadOptions = DEFAULTS,
        width_axis: str = "mlp_ff",
    ) -> None:
        if gate_up.ndim != 3 or gate_up.shape[0] != 2 or down.shape != (gate_up.shape[2], gate_up.shape[1]):
            raise ValueError(f"GatedMLP: gate_up {gate_up.shape} must be [2, F, D] and down {down.shape} [D, F]")
        for name, weight in (("gate_up", gate_up), ("down", down)):
            if not isinstance(weight, FP8BlockArray) and weight.dtype != jnp.bfloat16:
                raise ValueError(f"GatedMLP: {name} must be bfloat16, not {weight.dtype}")
        self.activation = activation
        self.layout = mlp_layout(down.shape[1], mesh, tokens, options)
        self.gate_up = weight_variable(gate_up, (None, width_axis, "hidden"))
        self.down = weight_variable(down, ("hidden", width_axis))
        place_parameters(self, self.layout)

    @classmethod
    def random(cls, hidden_size: int, width: int, *, activation: Activation, rngs: nnx.Rngs) -> "GatedMLP":
        """Random weights for `hidden_size` D and `width` F, of variance 1 / fan-in."""
        gate_up = random_weight(rngs, (2, width, hidden_size))
        return cls(gate_up, random_weight(rngs, (hidden_size, width)), activation=activation)

    def __call__(self, x: Float[Array, "... d"], mask: Bool[Array, "..."] | None = None) -> Float[Array, "... d"]:
        """`[..., D] -> [..., D]` in the dtype of `x`, which is rounded to bfloat16 on entry.

        `mask` is there so that dense and MoE layers are called alike: it only says what not to route.
        """
        return self.layout.unflat(self.trace(x, mask)["output"], x)

    def trace(self, x: Float[Array, "... d"], mask: Bool[Array, "..."] | None = None) -> dict[str, Array]:
        """The stages over flattened tokens: only `output [T, D]`, in the dtype of `x`."""
        check_tokens(x, mask, self.down.get_value().shape[0])
        return self.layout.run(GatedMLP._stages, parameter_specs, self, self.layout.flat(x, 1))

    def _stages(self, x_TD: Float[Array, "t d"]) -> dict[str, Array]:
        """One rank's `trace`."""
        ranks = self.layout.ranks
        _, y_TD = ranks.total(None, self.project(ranks.gather(to_bfloat16(x_TD)), ranks.splits_mlp))
        return {"output": to_bfloat16(y_TD).astype(x_TD.dtype)}

    def project(self, x_TD: BFloat16[Array, "t d"], partial: bool) -> Float[Array, "t d"]:
        """The MLP with the weights at hand: `[T, D] -> [T, D]`, bfloat16; float32 if it is a part of a sum."""
        hidden_TF = dense_matmul(x_TD, self.gate_up.get_value(), activation=self.activation)
        return dense_matmul(hidden_TF, self.down.get_value(), out_format="f32" if partial else "bf16")

    def activation_probe(self, gate: BFloat16[Array, " p"], up: BFloat16[Array, " p"]) -> BFloat16[Array, " p"]:
        """This layer's activation on given values of gate and up: `[P], [P] -> [P]`."""
        return apply_activation(self.activation, jnp.stack([gate, up], axis=-1))[:, 0]


def mlp_layout(width: int, mesh: Mesh | None, tokens: str, options: LoadOptions) -> Layout:
    """The layout of a dense layer whose MLP is `width` wide; raises what `make_mlp_layout` raises."""
    return make_mlp_layout(
        width,
        mesh,
        tokens,
        Travel(options.wire),
        split_shared=options.split_shared,
        gpus_per_node=options.gpus_per_node,
    )


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
