"""FP8 weights: e4m3 values with one scale, a power of two, for each block of 128 rows by 128 columns.

value = e4m3 * scale, scale = 2^max(ceil(log2(amax / 448)), -100): nothing saturates; values are exact in bfloat16
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels import e8m0

BLOCK = 128  # rows and columns that share a scale; what is left at an edge is a block of its own
LARGEST = 448.0  # the largest e4m3 magnitude
SMALLEST_EXPONENT = -100  # of a scale: times e4m3's smallest, 2^-9, that is still a normal bfloat16


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class FP8BlockArray:
    """A logical array `[..., N, K]` in e4m3 with block scales. A pytree of two leaves.

    Attributes:
        values: float8_e4m3fn `[..., N, K]`.
        scales: float32 `[..., ceil(N / 128), ceil(K / 128)]`, powers of two, NaN for a block that held no numbers.

    Raises:
        ValueError: a dtype or shape breaks this contract.
    """

    values: Float[Array, "..."]
    scales: Float32[Array, "..."]

    def __post_init__(self) -> None:
        if self.values.dtype != jnp.float8_e4m3fn or self.scales.dtype != jnp.float32:
            raise ValueError(
                f"FP8BlockArray: values must be float8_e4m3fn and scales float32, not {self.values.dtype} and "
                f"{self.scales.dtype}"
            )
        *lead, rows, columns = self.values.shape
        expected = (*lead, -(-rows // BLOCK), -(-columns // BLOCK))
        if self.scales.shape != expected:
            raise ValueError(
                f"FP8BlockArray: values {self.values.shape} need scales {expected}, not {self.scales.shape}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape `[..., N, K]`."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    def dequantize(self) -> Float[Array, "..."]:
        """The values in bfloat16, exactly. Written so that XLA can do it inside the product that reads them."""
        rows, columns = self.shape[-2:]
        scales = self.scales.astype(jnp.bfloat16)
        scales = jnp.repeat(jnp.repeat(scales, BLOCK, axis=-2)[..., :rows, :], BLOCK, axis=-1)[..., :columns]
        return self.values.astype(jnp.bfloat16) * scales

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], None]:
        key = jax.tree_util.GetAttrKey
        return ((key("values"), self.values), (key("scales"), self.scales)), None

    @classmethod
    def tree_unflatten(cls, _: None, leaves: tuple[Any, Any]) -> "FP8BlockArray":
        # JAX also unflattens placeholders that are no arrays, so the invariants are not checked here.
        self = object.__new__(cls)
        object.__setattr__(self, "values", leaves[0])
        object.__setattr__(self, "scales", leaves[1])
        return self


@jax.jit
def quantize_fp8_block(x: Float[Array, "... n k"]) -> FP8BlockArray:
    """Encodes `x [..., N, K]` (any float dtype) to the nearest values, ties to even; -0 stays.

    Raises:
        ValueError: `x` is not floating point or has fewer than two axes.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.ndim < 2:
        raise ValueError(f"quantize_fp8_block takes a floating-point array [..., N, K], not {x.dtype}{list(x.shape)}")
    *lead, rows, columns = x.shape
    down, across = -(-rows // BLOCK), -(-columns // BLOCK)
    edges = [(0, 0)] * len(lead) + [(0, down * BLOCK - rows), (0, across * BLOCK - columns)]
    blocks = jnp.pad(x.astype(jnp.float32), edges).reshape(*lead, down, BLOCK, across, BLOCK)
    by_block = jnp.moveaxis(blocks, -3, -2).reshape(*lead, down, across, BLOCK * BLOCK)
    byte = e8m0.scale_bytes(by_block, LARGEST).astype(jnp.int32)
    poisoned = byte == e8m0.NAN_BYTE
    exponent = jnp.maximum(byte - e8m0.BIAS, SMALLEST_EXPONENT)
    scaled = e8m0.times_power_of_two(blocks, -exponent[..., :, None, :, None])
    values = jnp.where(poisoned[..., :, None, :, None], 0, scaled).astype(jnp.float8_e4m3fn)
    values = values.reshape(*lead, down * BLOCK, across * BLOCK)[..., :rows, :columns]
    scales = e8m0.times_power_of_two(jnp.ones(exponent.shape, jnp.float32), exponent)
    return FP8BlockArray(values, jnp.where(poisoned, jnp.nan, scales))
