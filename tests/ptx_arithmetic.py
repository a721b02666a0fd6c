"""What PTX's instructions compute, for `ptx_interpreter`: of lanes alone, nothing of memory or of other lanes.

Approximations (`ex2.approx`, `rcp.approx`, `rsqrt.approx`, `tanh.approx`) are float32's own functions here, better than
a GPU's. `fma.rn.f32` is rounded twice, by way of float64: right where the sum is exact.
"""

import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

Lanes = NDArray[Any]  # [warps, 32]: uint64, of which a register of 32 bits has the lower ones, or bool

GARBAGE = 0xDEAD_BEEF


def _shifted(shift: Callable[[Any, Any], Any], x: Lanes, by: Lanes) -> Lanes:
    if (by > 31).any():
        raise NotImplementedError("a shift by more than 31")
    return shift(x, by)


def _upper_half(x: Lanes, y: Lanes) -> Lanes:
    """Of the 128 bits of a product."""
    half, lower = np.uint64(32), np.uint64(0xFFFF_FFFF)
    first = (x >> half) * (y & lower) + ((x & lower) * (y & lower) >> half)
    second = (x & lower) * (y >> half) + (first & lower)
    return (x >> half) * (y >> half) + (first >> half) + (second >> half)


def _larger_halves(x: Lanes, y: Lanes) -> Lanes:
    """Of the two halves of 32 bits each."""
    half, lower = np.uint64(16), np.uint64(0xFFFF)
    return np.maximum(x >> half, y >> half) << half | np.maximum(x & lower, y & lower)


def _of_float32(function: Callable[..., Any]) -> Callable[..., Lanes]:
    """A function of float32, on their bits."""

    def on_bits(*lanes: Lanes) -> Lanes:
        with np.errstate(all="ignore"):
            result = function(*(each.astype(np.uint32).view(np.float32) for each in lanes))
        return result.view(np.uint32)

    return on_bits


def _without_subnormals(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of float32 whose argument and result are zeros of their sign where they are subnormal."""

    def flushed(x: Any) -> Any:
        return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)

    return lambda x: flushed(function(flushed(x)))


def _two_rounded(upper: Lanes, lower: Lanes) -> Lanes:
    """Of float32, to bfloat16."""
    halves = (each.astype(jnp.bfloat16).view(np.uint16).astype(np.uint32) for each in (lower, upper))
    return next(halves) | next(halves) << np.uint32(16)


def _two_saturated(upper: Lanes, lower: Lanes) -> Lanes:
    """Of float32, to E4M3."""
    bytes_ = (np.clip(each, -448, 448).astype(jnp.float8_e4m3fn).view(np.uint8) for each in (lower, upper))
    first, second = (each.astype(np.uint32) for each in bytes_)
    return first | second << np.uint32(8)


def _multiplied_and_added(x: Lanes, y: Lanes, z: Lanes) -> Lanes:
    """A product of two float32 has 48 bits at most, so only the sum is rounded, and then once more."""
    x, y, z = (lanes.astype(np.float64) for lanes in (x, y, z))
    return (x * y + z).astype(np.float32)


# By the opcode without its last part, the type of its operands: sign-extended to int64 if they are signed.
COMPUTED: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("mov", "cvt.u16", "cvt.u32", "cvt.u64", "cvta.to.global"), lambda x: x),
    "add": operator.add,
    "sub": operator.sub,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": operator.invert,
    "min": np.minimum,
    "max": np.maximum,
    "mul.lo": operator.mul,
    "mul.wide": operator.mul,
    "mad.lo": lambda x, y, z: x * y + z,
    "shl": lambda x, by: _shifted(operator.lshift, x, by),
    "shr": lambda x, by: _shifted(operator.rshift, x, by),
    "selp": lambda x, y, chooses: np.where(chooses, x, y),
    "popc": np.bitwise_count,
    **{f"setp.{name}": getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
}
OF_ONE_TYPE: dict[str, Callable[..., Any]] = {
    "div.u32": lambda x, y: np.where(y == 0, np.uint64(GARBAGE), x // np.maximum(y, np.uint64(1))),
    "mul.hi.u16": lambda x, y: x * y >> np.uint64(16),
    "mul.hi.u32": lambda x, y: x * y >> np.uint64(32),
    "mul.hi.u64": _upper_half,
    "max.u16x2": _larger_halves,
    "bfe.u32": lambda x, start, length: x >> start & (np.uint64(1) << length) - np.uint64(1),
    "add.rn.f32": _of_float32(operator.add),
    "mul.rn.f32": _of_float32(operator.mul),
    "div.rn.f32": _of_float32(operator.truediv),
    "rsqrt.approx.f32": _of_float32(lambda x: np.float32(1) / np.sqrt(x)),
    "tanh.approx.f32": _of_float32(np.tanh),
    "ex2.approx.ftz.f32": _of_float32(_without_subnormals(np.exp2)),
    "rcp.approx.ftz.f32": _of_float32(_without_subnormals(lambda x: np.float32(1) / x)),
    "cvt.rn.bf16x2.f32": _of_float32(_two_rounded),
    "cvt.rn.satfinite.e4m3x2.f32": _of_float32(_two_saturated),
    "fma.rn.f32": _of_float32(_multiplied_and_added),
    "selp.f32": COMPUTED["selp"],
}
AGREED: dict[str, Callable[..., Any]] = {"add": np.sum, "max": np.max, "min": np.min}
