"""MXFP4: four-bit E2M1 codes with one E8M0 scale byte for each 32 elements along the last axis.

value = (-1)^(code >> 3) * (0, 0.5, 1, 1.5, 2, 3, 4, 6)[code & 7] * 2^(scale - 127)        scale 255: NaN
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from pallas_kernels import e8m0

LARGEST = 6.0  # the largest E2M1 magnitude


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class MXFP4Array:
    """A logical array `[..., N, K]` in MXFP4, as checkpoints store it. A pytree of two leaves.

    Attributes:
        codes: uint8 `[..., N, K/2]`, two codes a byte; the low nibble is the even element.
        scales: uint8 `[..., N, K/32]`.

    Raises:
        ValueError: a dtype or shape breaks this contract.
    """

    codes: UInt8[Array, "..."]
    scales: UInt8[Array, "..."]

    def __post_init__(self) -> None:
        for name, leaf in (("codes", self.codes), ("scales", self.scales)):
            if leaf.dtype != jnp.uint8:
                raise ValueError(f"MXFP4Array: {name} must be uint8, not {leaf.dtype}")
            if leaf.ndim < 2:
                raise ValueError(f"MXFP4Array: {name} has shape {leaf.shape}; at least [N, K] is needed")
        expected = (*self.codes.shape[:-1], self.codes.shape[-1] * 2 // e8m0.BLOCK)
        if self.codes.shape[-1] * 2 % e8m0.BLOCK or self.scales.shape != expected:
            raise ValueError(
                f"MXFP4Array: codes {self.codes.shape} and scales {self.scales.shape} do not belong together; "
                "codes [..., N, K/2] need scales [..., N, K/32]"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape `[..., N, K]`."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 2)

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> Float[Array, "..."]:
        """The values, `[..., N, K]`: exact in bfloat16 and float32 (subnormals too; infinite where out of range).

        Any other floating-point dtype is rounded from float32.

        Raises:
            ValueError: `dtype` is not floating point.
        """
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"MXFP4Array.dequantize: dtype={jnp.dtype(dtype).name} is not a floating-point type")
        if jnp.dtype(dtype) == jnp.bfloat16:
            return jax.lax.bitcast_convert_type(_value_bits(self, jnp.int16, mantissa=7), jnp.bfloat16)
        return jax.lax.bitcast_convert_type(_value_bits(self, jnp.int32, mantissa=23), jnp.float32).astype(dtype)

    def __getitem__(self, index: int | slice | Array | np.ndarray) -> "MXFP4Array":
        """Indexes the leading axes: `w[g]` is expert g of `[G, N, K]`. Rows and columns are not to be indexed."""
        return MXFP4Array(self.codes[index], self.scales[index])

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], None]:
        key = jax.tree_util.GetAttrKey
        return ((key("codes"), self.codes), (key("scales"), self.scales)), None

    @classmethod
    def tree_unflatten(cls, _: None, leaves: tuple[Any, Any]) -> "MXFP4Array":
        # JAX also unflattens placeholders that are no arrays, so the invariants are not checked here.
        self = object.__new__(cls)
        object.__setattr__(self, "codes", leaves[0])
        object.__setattr__(self, "scales", leaves[1])
        return self


@jax.jit
def quantize_mxfp4(x: Float[Array, "... n k"]) -> MXFP4Array:
    """Encodes `x [..., N, K]` (any float dtype, K a multiple of 32) to the nearest MXFP4 values, ties to even.

    The block exponent is `ceil(log2(amax / 6))`: the smallest that saturates nothing. Other encoders differ (some let
    amax up to 7 saturate at 6); reading never depends on the choice. An all-zero block has scale byte 0. A block that
    holds an infinity or a NaN has scale byte 255, so all its values read as NaN.

    Raises:
        ValueError: `x` is not floating point, has fewer than two axes, or K is not a multiple of 32.
    """
    e8m0.require_blocks("quantize_mxfp4", x)
    if x.ndim < 2:
        raise ValueError(f"quantize_mxfp4: shape {x.shape} must be [..., N, K]")
    x = x.astype(jnp.float32)
    scales = e8m0.block_scales(x, LARGEST)
    return MXFP4Array(encode(x, scales), scales)


def encode(x: Float[Array, "... n k"], scales: UInt8[Array, "... n b"]) -> UInt8[Array, "... n half"]:
    """The packed codes of float32 `x` under given scales: nearest, ties to even, magnitudes over 6 saturating."""
    scaled = e8m0.divide_by_scales(x, scales)
    magnitude = jnp.abs(scaled)
    # Midpoints between neighbouring magnitudes; a tie goes to the even code, hence the alternation of > and >=.
    code = jnp.zeros(x.shape, jnp.uint8)
    for midpoint, tie_rounds_up in zip((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), (False, True) * 4, strict=False):
        code += (magnitude >= midpoint if tie_rounds_up else magnitude > midpoint).astype(jnp.uint8)
    poisoned = jnp.repeat(scales, e8m0.BLOCK, axis=-1) == e8m0.NAN_BYTE
    code = jnp.where(poisoned, 0, code | (jnp.signbit(scaled).astype(jnp.uint8) << 3))
    return code[..., 0::2] | (code[..., 1::2] << 4)


def _value_bits(w: MXFP4Array, integer: type, *, mantissa: int) -> Array:
    """Every value's bits in a float format of eight exponent and `mantissa` mantissa bits, as integers of its width."""
    pairs = jnp.stack([w.codes & 0xF, w.codes >> 4], axis=-1)
    code = pairs.reshape(*w.scales.shape, e8m0.BLOCK).astype(integer)
    scale = w.scales[..., None].astype(integer)
    field = code & 7  # two exponent bits, one mantissa bit
    # Code 1 is the format's subnormal, 0.5; from 2 on the exponent is field // 2 - 1 and the mantissa bit field % 2.
    significand = jnp.where(field < 2, field << mantissa, (2 | (field & 1)) << (mantissa - 1))
    biased = scale + jnp.where(field < 2, -1, (field >> 1) - 1)
    normal = (jnp.clip(biased, 1, 254) << mantissa) | (significand & ((1 << mantissa) - 1))
    subnormal = significand >> jnp.clip(1 - biased, 0, mantissa)  # exact: two bits at the top, shifted by two at most
    magnitude = jnp.where(biased >= 1, normal, subnormal)
    magnitude = jnp.where(biased >= 255, 0xFF << mantissa, magnitude)  # infinity
    magnitude = jnp.where(significand == 0, 0, magnitude)
    sign = jnp.where(code >= 8, jnp.iinfo(integer).min, 0).astype(integer)
    nan = 0x1FF << (mantissa - 1)
    return jnp.where(scale == e8m0.NAN_BYTE, nan, magnitude | sign).astype(integer).reshape(w.shape)
