"""The dense weights of layers, and the variables that hold them."""

from flax import nnx
from jaxtyping import Array

from pallas_kernels import FP8BlockArray

Weight = Array | FP8BlockArray
"""bfloat16, or e4m3 with block scales, of which every value is exact in bfloat16."""


class FrozenWeight(nnx.Variable):
    """A quantised weight. Not an `nnx.Param`: nothing trains or casts it."""


def weight_variable(weight: Weight, axes: tuple[str | None, ...]) -> nnx.Variable:
    """The variable that holds `weight` in a layer."""
    return FrozenWeight(weight, axes=axes) if isinstance(weight, FP8BlockArray) else nnx.Param(weight, axes=axes)
