"""Activations in eight bits: E4M3 values with one E8M0 scale a 32-block (MXFP8), or with one float32 scale a token."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import e8m0, select

LARGEST = 448.0  # the largest E4M3 magnitude


@dataclasses.dataclass(frozen=True)
class _ScaledArray:
    """Two leaves, `values` and `scales`; what MXFP8Array and TokenScaledArray share as pytrees."""

    values: Float[Array, "..."]
    scales: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape `[..., K]`."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], None]:
        key = jax.tree_util.GetAttrKey
        return ((key("values"), self.values), (key("scales"), self.scales)), None

    @classmethod
    def tree_unflatten(cls, _: None, leaves: tuple[Any, Any]) -> Self:
        # JAX also unflattens placeholders that are no arrays, so the invariants are not checked here.
        self = object.__new__(cls)
        object.__setattr__(self, "values", leaves[0])
        object.__setattr__(self, "scales", leaves[1])
        return self

    def _require(self, scale_dtype: jax.typing.DTypeLike, scale_shape: tuple[int, ...], contract: str) -> None:
        name = type(self).__name__
        if self.values.dtype != jnp.float8_e4m3fn or self.scales.dtype != scale_dtype:
            raise ValueError(f"{name}: values {self.values.dtype} and scales {self.scales.dtype} must be {contract}")
        if self.scales.shape != scale_shape:
            raise ValueError(f"{name}: values {self.values.shape} need scales {scale_shape}, not {self.scales.shape}")


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class MXFP8Array(_ScaledArray):
    """A logical array `[..., K]`: float8_e4m3fn `values [..., K]` times `2^(scales - 127)`, uint8 `scales [..., K/32]`.

    Raises:
        ValueError: a dtype or shape breaks this contract.
    """

    def __post_init__(self) -> None:
        if self.values.ndim < 1 or self.values.shape[-1] % e8m0.BLOCK:
            raise ValueError(f"MXFP8Array: values {self.values.shape} must end in a multiple of {e8m0.BLOCK}")
        scale_shape = (*self.values.shape[:-1], self.values.shape[-1] // e8m0.BLOCK)
        self._require(jnp.uint8, scale_shape, "float8_e4m3fn and uint8")

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> Float[Array, "... k"]:
        """The values: exact in float32, subnormals too; exact in bfloat16 down to its subnormals' last bit, 2^-133."""
        return e8m0.apply_scale(self.values.astype(jnp.float32), self.scales).astype(dtype)


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class TokenScaledArray(_ScaledArray):
    """A logical array `[..., K]`: float8_e4m3fn `values [..., K]` times float32 `scales [..., 1]`, one for each token.

    Raises:
        ValueError: a dtype or shape breaks this contract.
    """

    def __post_init__(self) -> None:
        self._require(jnp.float32, (*self.values.shape[:-1], 1), "float8_e4m3fn and float32")

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> Float[Array, "... k"]:
        """The values, as the float32 product rounded to `dtype`."""
        return (self.values.astype(jnp.float32) * self.scales).astype(dtype)


def quantize_mxfp8(x: Float[Array, "... k"], *, implementation: str | None = None) -> MXFP8Array:
    """Encodes `x [..., K]` (any float dtype, K a multiple of 32) in MXFP8, nearest values, ties to even.

    The block exponent is `ceil(log2(amax / 448))`, built from bits: nothing saturates, and no reciprocal of a tiny amax
    exists to overflow. An all-zero block has scale byte 0 and zeros; one that holds an infinity or a NaN has scale byte
    255, so all its values read as NaN. Subnormal inputs are exact.

    Raises:
        ValueError: `x` is not floating point, K is not a multiple of 32, or no such implementation exists.
        NotImplementedError: the named implementation has no such kernel.
    """
    select.choose("quantize_mxfp8", implementation)
    e8m0.require_blocks("quantize_mxfp8", x)
    x = x.astype(jnp.float32)
    scales = e8m0.block_scales(x, LARGEST)
    finite = jnp.where(jnp.repeat(scales, e8m0.BLOCK, axis=-1) == e8m0.NAN_BYTE, 0, x)
    return MXFP8Array(e8m0.divide_by_scales(finite, scales).astype(jnp.float8_e4m3fn), scales)


def quantize_fp8_token(x: Float[Array, "... k"], *, implementation: str | None = None) -> TokenScaledArray:
    """Encodes `x [..., K]` (any float dtype) in E4M3 with one float32 scale a token: `max(amax / 448, 2^-126)`.

    Values are the nearest E4M3 to `x / scale`, clipped to +-448 because the cast does not saturate. Magnitudes below
    2^-126 count as zero (backends differ on float32 subnormals, so they are cleared first); the scale's floor keeps
    the division finite. A token that holds an infinity or a NaN has scale NaN, so all its values read as NaN.

    Raises:
        ValueError: `x` is not floating point or a scalar, or no such implementation exists.
        NotImplementedError: the named implementation has no such kernel.
    """
    select.choose("quantize_fp8_token", implementation)
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.ndim < 1:
        raise ValueError(f"quantize_fp8_token takes a floating-point array [..., K], not {x.dtype}{list(x.shape)}")
    tiny = jnp.finfo(jnp.float32).tiny
    x = x.astype(jnp.float32)
    x = jnp.where(jnp.abs(x) < tiny, 0, x)
    amax = jnp.max(jnp.abs(x), axis=-1, keepdims=True, initial=0)
    scales = jnp.where(jnp.isfinite(amax), jnp.maximum(amax / LARGEST, tiny), jnp.float32(jnp.nan))
    scaled = jnp.where(jnp.isnan(scales), 0, x / scales)
    return TokenScaledArray(jnp.clip(scaled, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn), scales)
