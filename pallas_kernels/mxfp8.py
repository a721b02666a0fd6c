"""Activations in eight bits: E4M3 values with one E8M0 scale a 32-block (MXFP8), or with one float32 scale a token."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import e8m0, row_kernels, select
from pallas_kernels.rounding import to_e4m3

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
    def tree_unflatten(cls, _: None, leaves: tuple[Any, Any]) -> Any:
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


@functools.partial(jax.jit, static_argnames=("implementation",))
def quantize_mxfp8(x: Float[Array, "... k"], *, implementation: str | None = None) -> MXFP8Array:
    """Encodes `x [..., K]` (any float dtype, K a multiple of 32) in MXFP8, nearest values, ties to even.

    The block exponent is `ceil(log2(amax / 448))`, built from bits: nothing saturates, and no reciprocal of a tiny amax
    exists to overflow. An all-zero block has scale byte 0 and zeros; one that holds an infinity or a NaN has scale byte
    255, so all its values read as NaN. Subnormal inputs are exact.

    Raises:
        ValueError: `x` is not floating point, K is not a multiple of 32, or no such implementation exists.
        NotImplementedError: the named implementation cannot run this here ("mosaic": Hopper and Blackwell, bfloat16
            rows; "triton": NVIDIA GPUs from Ampere on).
    """
    e8m0.require_blocks("quantize_mxfp8", x)
    chosen = select.choose("quantize_mxfp8", implementation, x=x)
    if chosen in row_kernels.IMPLEMENTATIONS:
        return row_kernels.of(chosen).quantize_mxfp8(x)
    x = x.astype(jnp.float32)
    scales = e8m0.block_scales(x, LARGEST)
    finite = jnp.where(jnp.repeat(scales, e8m0.BLOCK, axis=-1) == e8m0.NAN_BYTE, 0, x)
    return MXFP8Array(to_e4m3(e8m0.divide_by_scales(finite, scales)), scales)


@functools.partial(jax.jit, static_argnames=("implementation",))
def quantize_fp8_token(
    x: Float[Array, "... k"], *, amax: Float[Array, "... 1"] | None = None, implementation: str | None = None
) -> TokenScaledArray:
    """Encodes `x [..., K]` (any float dtype) in E4M3 with one scale a token, nearest values, ties to even.

    The scale is `2^ceil(log2(amax / 448))` (at least 2^-126), not `amax / 448`: E4M3 is as precise at either, and a
    power of two divides exactly. By another number bfloat16 rows meet many exact ties, which go one way or the other
    with the last bit of the backend's division. Any scale is as good to read. A token that holds an infinity or a NaN
    has scale NaN, so all its values read as NaN. Where `x` is a part of each token only, `amax` is the whole token's.

    Raises:
        ValueError: `x` is not floating point or a scalar, or no such implementation exists.
        NotImplementedError: the named implementation cannot run this here ("mosaic": Hopper and Blackwell, bfloat16
            rows; "triton": NVIDIA GPUs from Ampere on).
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.ndim < 1:
        raise ValueError(f"quantize_fp8_token takes a floating-point array [..., K], not {x.dtype}{list(x.shape)}")
    chosen = select.choose("quantize_fp8_token", implementation, x=x)
    if implementation in row_kernels.IMPLEMENTATIONS and amax is not None:
        raise NotImplementedError(
            f"quantize_fp8_token: the {implementation} kernel finds amax itself; pass implementation='xla'"
        )
    if chosen in row_kernels.IMPLEMENTATIONS and amax is None:
        return row_kernels.of(chosen).quantize_fp8_token(x)
    x = x.astype(jnp.float32)
    byte = e8m0.scale_bytes(x if amax is None else amax.astype(jnp.float32), LARGEST)[..., None]
    poisoned = byte == e8m0.NAN_BYTE
    exponent = jnp.maximum(byte.astype(jnp.int32) - e8m0.BIAS, -126)  # a subnormal scale would be flushed when used
    power = e8m0.times_power_of_two(jnp.ones(byte.shape, jnp.float32), exponent)
    values = to_e4m3(e8m0.times_power_of_two(jnp.where(poisoned, 0, x), -exponent))
    return TokenScaledArray(values, jnp.where(poisoned, jnp.float32(jnp.nan), power))
