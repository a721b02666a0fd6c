"""Putting adapters on a layer, and merging them into its experts with the error that four bits add."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from k3jax.adapters import ExpertAdapters
from k3jax.experts import FrozenExperts
from k3jax.kernel_placement import lay_out_experts
from k3jax.moe import MoE
from k3jax.parameters import place_parameters
from pallas_kernels import KernelWeights, MXFP4Array, from_kernel_layout, lay_out, quantize_mxfp4


@dataclasses.dataclass(frozen=True)
class MergeError:
    """What rounding has lost: relative L2 of each expert's merged weights, float32 `[E]` each.

    Exactly 0 where an expert's adapter adds nothing: its bytes are left as they were.
    """

    w13: np.ndarray
    w2: np.ndarray

    def __str__(self) -> str:
        """One line: means and worst experts."""
        told = ", ".join(
            f"{name} {np.mean(values):.1e} on average, {np.max(values):.1e} at most (expert {int(np.argmax(values))})"
            for name, values in (("w13", self.w13), ("w2", self.w2))
        )
        return f"relative L2 error of rounding merged experts: {told}"


def add_adapters(layer: MoE, *, rank: int, scale: float = 1.0, shared: bool = False, rngs: nnx.Rngs) -> None:
    """Gives `layer` adapters of rank `rank`, in place; they change nothing until they are trained.

    What they add comes before the activation, which kernels fuse in: until they are merged, w13 runs on `xla`.

    Args:
        scale: of what they add. shared: one pair of matrices for all experts instead of one for each.

    Raises:
        ValueError: the layer has adapters, or the rank is not positive.
        NotImplementedError: the layer was asked to run on "mosaic", or experts lie in a kernel's layout over a mesh.
    """
    if layer.adapters is not None:
        raise ValueError("the layer has adapters already; merge_adapters makes them part of its experts")
    if layer.implementation == "mosaic":
        raise NotImplementedError("adapters add before the activation, which mosaic fuses in: use implementation=None")
    adapters = ExpertAdapters(layer.config, rank=rank, scale=scale, shared=shared, rngs=rngs)
    _out_of_kernel_layout(layer, layer.w13)
    place_parameters(adapters, layer.layout)
    layer.adapters = adapters


def merge_adapters(layer: MoE) -> MergeError:
    """Makes the adapters part of the experts and removes them; the layer changes in place.

    `w + scale * b a` in float32 is rounded as the experts are kept: to MXFP4 with new scales, or to bfloat16.

    Raises:
        ValueError: the layer has no adapters.
        NotImplementedError: experts lie in a kernel's layout over a mesh.
    """
    if layer.adapters is None:
        raise ValueError("the layer has no adapters to merge")
    own = layer.adapters.arrays()
    errors = []
    for experts, a, b in ((layer.w13, own.a13, own.b13), (layer.w2, own.a2, own.b2)):
        _out_of_kernel_layout(layer, experts)
        merged, error = _merged(experts.get_value(), a, b, jnp.float32(own.scale))
        experts.set_value(merged)
        errors.append(np.asarray(error))
    layer.adapters = nnx.data(None)
    place = functools.partial(lay_out, recipe=layer.recipe, implementation=layer.implementation)
    lay_out_experts(layer.w13, layer.w2, layer.layout, place)
    return MergeError(*errors)


@jax.jit
def _merged(w: Any, a: Array, b: Array, scale: Array) -> tuple[Any, Array]:
    """Experts `[E, ..., N, K]` with `scale * b a` added, one at a time, and the relative error of each."""

    def one(e: Array) -> tuple[Any, Array]:
        group = jnp.minimum(e, a.shape[0] - 1)  # Shared adapters have one group.
        old = jax.tree.map(lambda leaf: leaf[e], w)
        packed = isinstance(old, MXFP4Array)
        left, right = b[group].astype(jnp.float32), a[group].astype(jnp.float32)
        added = scale * jnp.matmul(left, right, precision="highest")
        wanted = (old.dequantize(jnp.float32) if packed else old.astype(jnp.float32)) + added
        new = quantize_mxfp4(wanted) if packed else wanted.astype(jnp.bfloat16)
        untouched = jnp.logical_not(jnp.any(added))
        new = jax.tree.map(lambda before, after: jnp.where(untouched, before, after), old, new)
        kept = new.dequantize(jnp.float32) if packed else new.astype(jnp.float32)
        error = jnp.linalg.norm(kept - wanted) / jnp.maximum(jnp.linalg.norm(wanted), jnp.finfo(jnp.float32).tiny)
        return new, error

    return jax.lax.map(one, jnp.arange(jax.tree.leaves(w)[0].shape[0]))


def _out_of_kernel_layout(layer: MoE, experts: FrozenExperts) -> None:
    """Puts back MXFP4 as checkpoints have it; anything else stays."""
    w = experts.get_value()
    if not isinstance(w, KernelWeights):
        return
    if layer.layout.mesh is not None:
        raise NotImplementedError(
            "adapters on experts in a kernel's layout over a mesh: load with implementation='xla'"
        )
    plain = from_kernel_layout(w)
    if w.gated:
        plain = jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0], 2, -1, leaf.shape[-1]), plain)
    experts.set_value(plain)
