"""Arithmetic on one thread's values: pairs of bfloat16, the activations, and E4M3 with scales that are powers of two.

A pair is a 32-bit word of two bfloat16, the lower half first. The encoders give the bits of `pallas_kernels.mxfp8`.
"""

import functools
import math
from collections.abc import Sequence

from pallas_kernels.grouped_matmul.mosaic_parts.ptx import (
    Value,
    add,
    arith,
    both,
    constant,
    f32,
    i32,
    left,
    less,
    ptx,
    right,
)
from pallas_kernels.situ import Activation, Situ

_INFINITY = 0x7F80  # bfloat16 magnitudes compare like their bits; a NaN's are larger still


def pack(low: Value, high: Value) -> Value:
    """Two float32 rounded to a pair."""
    return ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", high, low, out=i32())


def unpack(pair: Value) -> tuple[Value, Value]:
    """A pair as two float32."""
    low, high = (arith.bitcast(f32(), bits) for bits in (left(pair, 16), both(pair, 0xFFFF0000)))
    return low, high


def activate(activation: Activation, gate: Value, up: Value) -> Value:
    """`activation(gate, up)` of float32 within 2^-10 relatively, in the fewest instructions."""
    sigmoid = _reciprocal(_one_plus_power(gate))
    if not isinstance(activation, Situ):
        return arith.mulf(arith.mulf(gate, sigmoid), up)
    bounded = arith.mulf(_times(_tanh(_times(gate, 1 / activation.beta)), activation.beta), sigmoid)
    if activation.linear_beta is None:
        return arith.mulf(bounded, up)
    return arith.mulf(bounded, _times(_tanh(_times(up, 1 / activation.linear_beta)), activation.linear_beta))


def activate_precisely(activation: Activation, gate: Value, up: Value) -> Value:
    """`activation(gate, up)` of float32, a few of its last bits off at any magnitude: one division for all factors."""
    denominator = _one_plus_power(gate)
    if not isinstance(activation, Situ):
        return arith.mulf(arith.mulf(gate, _reciprocal(denominator)), up)
    numerator, bottom = _bounded_fraction(gate, activation.beta)
    denominator = arith.mulf(denominator, bottom)
    if activation.linear_beta is None:
        return arith.mulf(arith.mulf(numerator, _reciprocal(denominator)), up)
    top, bottom = _bounded_fraction(up, activation.linear_beta)
    return arith.mulf(arith.mulf(numerator, top), _reciprocal(arith.mulf(denominator, bottom)))


def _bounded_fraction(x: Value, bound: float) -> tuple[Value, Value]:
    """Numerator and denominator of bound * tanh(x / bound): bound * (1 - a) / (1 + a) for a = e^(-2 |x / bound|), and
    Taylor's series near zero."""
    one, limit = (arith.constant(f32(), value) for value in (1.0, bound))
    t = _times(x, 1 / bound)
    magnitude = ptx("abs.f32 $0, $1;", t, out=f32())
    a = _power_of_two_of(_times(magnitude, -2 * math.log2(math.e)))
    far = ptx("copysign.f32 $0, $1, $2;", x, _fma(a, arith.constant(f32(), -bound), limit), out=f32())
    square, series = arith.mulf(t, t), arith.constant(f32(), -17 / 315)
    for coefficient in (2 / 15, -1 / 3, 1.0):  # what follows is below 2^-24 where it is used
        series = _fma(series, square, arith.constant(f32(), coefficient))
    near = arith.cmpf(arith.CmpFPredicate.OLT, magnitude, arith.constant(f32(), 0.2))
    return arith.select(near, arith.mulf(x, series), far), arith.select(near, one, arith.addf(one, a))


def _fma(a: Value, b: Value, c: Value) -> Value:
    return ptx("fma.rn.f32 $0, $1, $2, $3;", a, b, c, out=f32())


def _one_plus_power(gate: Value) -> Value:
    """1 + e^-gate, one over the sigmoid."""
    return arith.addf(_power_of_two_of(_times(gate, -math.log2(math.e))), arith.constant(f32(), 1.0))


def _power_of_two_of(exponent: Value) -> Value:
    return ptx("ex2.approx.ftz.f32 $0, $1;", exponent, out=f32())


def _reciprocal(value: Value) -> Value:
    return ptx("rcp.approx.ftz.f32 $0, $1;", value, out=f32())


def _times(value: Value, factor: float) -> Value:
    return arith.mulf(value, arith.constant(f32(), factor))


def _tanh(value: Value) -> Value:
    """The hardware's: relative error 2^-11 at most, near zero too."""
    return ptx("tanh.approx.f32 $0, $1;", value, out=f32())


def largest_magnitude(pairs: Sequence[Value]) -> Value:
    """The bits of the largest magnitude of some pairs: 15 of bfloat16."""
    magnitudes = [both(pair, 0x7FFF7FFF) for pair in pairs]
    most = functools.reduce(lambda a, b: ptx("max.u16x2 $0, $1, $2;", a, b, out=i32()), magnitudes)
    return arith.maxui(both(most, 0xFFFF), right(most, 16))


def largest_of_lanes(value: Value, lanes: int) -> Value:
    """The largest non-negative value of each `lanes` neighbouring lanes, a power of two; for a whole warp."""
    distance = 1
    while distance < lanes:
        code = "shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;"
        value = arith.maxui(value, ptx(code, value, constant(distance), out=i32(), volatile=True))
        distance *= 2
    return value


def scale_byte(magnitude: Value) -> Value:
    """`e8m0.scale_bytes` of a block whose largest bfloat16 magnitude has these bits, for E4M3's 448 = 1.75 * 2^8."""
    next_exponent = 0x7F - 0x60  # carries into the exponent where the mantissa is above that of 1.75
    exponent = right(add(magnitude, next_exponent), 7)
    byte = arith.maxsi(add(exponent, -8), constant(0))
    return arith.select(less(magnitude, _INFINITY), byte, constant(255))


def encode_e4m3(pairs: Sequence[Value], byte: Value) -> list[Value]:
    """Pairs divided by the scale 2^(byte - 127), as words of four E4M3 bytes; zeros where the byte is 255."""
    # At most 2^127, at least 2^-121: normal numbers. What becomes subnormal is far below E4M3's least.
    factor = arith.bitcast(f32(), left(arith.subi(constant(254), byte), 23))
    finite = less(byte, 255)
    values = [arith.mulf(value, factor) for pair in pairs for value in unpack(pair)]
    words = (_e4m3_word(values[i : i + 4]) for i in range(0, len(values), 4))
    return [arith.select(finite, word, constant(0)) for word in words]


def decode_e4m3(word: Value, byte: Value) -> tuple[Value, Value]:
    """A word of four E4M3 bytes times 2^(byte - 127), NaN where the byte is 255, rounded to two pairs."""
    scale = arith.select(less(byte, 1), constant(0x0040_0000), left(byte, 23))  # the least is subnormal
    scale = arith.bitcast(f32(), arith.select(less(byte, 255), scale, constant(0x7FC0_0000)))
    return _decoded_pair(both(word, 0xFFFF), scale), _decoded_pair(right(word, 16), scale)


def _decoded_pair(two: Value, scale: Value) -> Value:
    """Two E4M3 bytes, through halves, which hold them exactly."""
    code = """{ .reg .b16 bytes, low, high; .reg .b32 halves; cvt.u16.u32 bytes, $2;
cvt.rn.f16x2.e4m3x2 halves, bytes; mov.b32 {low, high}, halves; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"""
    values = ptx(code, two, out=[f32(), f32()])
    return pack(*(arith.mulf(value, scale) for value in values))


def _e4m3_word(values: Sequence[Value]) -> Value:
    """Four float32 of magnitude 448 at most, rounded to nearest even."""
    halves = (f"cvt.rn.satfinite.e4m3x2.f32 half{h}, ${2 * h + 2}, ${2 * h + 1};" for h in range(2))
    return ptx(f"{{ .reg .b16 half<2>; {' '.join(halves)} mov.b32 $0, {{half0, half1}}; }}", *values, out=i32())
