"""One step of healing: what of a layer trains, the gradient over micro-batches, the update of the master weights.

params (float32) -- cast --> the layer's own dtype -- with the frozen rest --> layer -- loss --> gradients
gradients of A micro-batches, averaged in float32 -- clip, AdamW --> params
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array

from k3jax.healing.loss import LossWeights, Power, distillation_loss
from k3jax.mlp import GatedMLP
from k3jax.moe import MoE

Params = dict[str, Array]
Batch = dict[str, Array]
Frozen = Any  # an nnx.State, whose own annotations run-time checkers reject


class TrainState(NamedTuple):
    """Float32 master weights by path, the optimiser's state, and how many steps were made."""

    params: Params
    optimizer: Any
    step: Array


@dataclass(frozen=True)
class Student:
    """The shape of a layer that trains: hashable, without any array. `split` makes it, `layer` is the way back."""

    graph: Any
    tree: jax.tree_util.PyTreeDef
    names: tuple[str, ...]
    dtypes: tuple[Any, ...]

    def layer(self, params: Params, frozen: Frozen) -> Any:
        """The layer with `params` rounded to the dtypes that it keeps."""
        leaves = [params[name].astype(dtype) for name, dtype in zip(self.names, self.dtypes, strict=True)]
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, leaves), frozen)


def split(layer: GatedMLP | MoE) -> tuple[Student, Params, Frozen]:
    """`(student, master weights, frozen)`. Frozen are packed experts, and the router's bias.

    The bias only chooses experts, and a choice has no derivative: its gradient is zero everywhere.
    """
    graph, *states = nnx.split(layer, trains, ...)
    trainable, frozen = states
    paths, tree = jax.tree_util.tree_flatten_with_path(trainable)
    names = tuple(_name(path) for path, _ in paths)
    student = Student(graph, tree, names, tuple(leaf.dtype for _, leaf in paths))
    return student, {name: _wide(leaf) for name, (_, leaf) in zip(names, paths, strict=True)}, frozen


def start(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step, which takes over the memory of `params`.

    Over a mesh every leaf lies as a step leaves it, so that the second step is the first one's program again.
    """
    state = TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))
    return jax.jit(lambda state: state, donate_argnums=0)(state)


Step = Callable[[TrainState, Frozen, Batch], tuple[TrainState, dict[str, Array]]]


def make_step(student: Student, optimizer: optax.GradientTransformation, power: Power, weights: LossWeights) -> Step:
    """`step(state, frozen, batch) -> (state, numbers)`, compiled; the old state's memory is taken over.

    Arrays of `batch` are `[A, T, ...]`: the gradient is the mean over A micro-batches of T tokens. The numbers are
    those of `distillation_loss`, `loss` itself, and the gradient's norm before it is clipped.
    """

    def loss(params: Params, frozen: Frozen, batch: Batch) -> tuple[Array, dict[str, Array]]:
        value, parts = distillation_loss(student.layer(params, frozen), batch, power, weights)
        return value, parts | {"loss": value}

    def step(state: TrainState, frozen: Frozen, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        # Rounded once and not for each micro-batch; a gradient is as wide as what it is taken with respect to.
        rounded = {n: state.params[n].astype(d) for n, d in zip(student.names, student.dtypes, strict=True)}
        gradients, numbers = _mean_gradient(jax.grad(loss, has_aux=True), rounded, frozen, batch)
        numbers["gradient_norm"] = optax.tree.norm(gradients)
        with jax.numpy_dtype_promotion("standard"):  # optax counts in integers and multiplies by them
            updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, optimizer_state, state.step + 1), numbers

    return jax.jit(step, donate_argnums=0)


def _mean_gradient(
    gradient: Callable[..., Any], params: Params, frozen: Frozen, batch: Batch
) -> tuple[Params, dict[str, Array]]:
    """The mean of `gradient(params, frozen, micro-batch)` over the micro-batches, in float32."""
    count = batch["x"].shape[0]
    if count == 1:
        found = gradient(params, frozen, jax.tree.map(lambda array: array[0], batch))
        return jax.tree.map(lambda value: value.astype(jnp.float32), found)

    def add(total: Any, micro: Batch) -> tuple[Any, None]:
        found = gradient(params, frozen, micro)
        return jax.tree.map(lambda a, b: a + b.astype(jnp.float32) / count, total, found), None

    shapes = jax.eval_shape(gradient, params, frozen, jax.tree.map(lambda array: array[0], batch))
    zeros = jax.tree.map(lambda shape: jnp.zeros(shape.shape, jnp.float32), shapes)
    total, _ = jax.lax.scan(add, zeros, batch)
    return total


def _wide(leaf: Any) -> Any:
    """`leaf` in float32; a shape without values stays one."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding)
    return leaf.astype(jnp.float32)


def trains(path: tuple[Any, ...], value: Any) -> bool:
    """The nnx filter for what trains: parameters, which packed experts are not, but not the router's bias."""
    return isinstance(value, nnx.Param) and path[-2:] != ("router", "bias")


def _name(path: tuple[Any, ...]) -> str:
    """`shared/down` for the key path of that variable's value."""
    keys = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", "")))) for key in path]
    return "/".join(key for key in keys if key != "value")
