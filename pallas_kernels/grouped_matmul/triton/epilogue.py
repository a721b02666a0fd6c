"""What the Triton kernels make of float32 sums: the activation, chosen when they are compiled, and the store."""

import triton.language as tl

from pallas_kernels.triton_call import jit

NONE = tl.constexpr(0)
SWIGLU = tl.constexpr(1)
SITU = tl.constexpr(2)  # with a linear beta
SITU_PLAIN_UP = tl.constexpr(3)  # without one

_LOG2_E = tl.constexpr(1.4426950408889634)
_FLAT = tl.constexpr(7.0)  # from where on tanh is 1 to 2e-6


@jit
def activate(
    gate: tl.tensor, up: tl.tensor, ACTIVATION: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr
) -> tl.tensor:
    """`SiTU(gate, up)` or `SwiGLU(gate, up)` of float32: one fraction, so that there is one division."""
    below = 1.0 + tl.exp2(gate * -_LOG2_E)  # of sigmoid(gate)
    if ACTIVATION == SWIGLU:
        y = gate / below * up
    else:
        above, factor = tanh_fraction(gate * (1.0 / BETA))
        above *= BETA
        below *= factor
        if ACTIVATION == SITU:
            up, factor = tanh_fraction(up * (1.0 / LINEAR_BETA))
            up *= LINEAR_BETA
            below *= factor
        y = above * up / below
    return y


@jit
def tanh_fraction(x: tl.tensor) -> tl.tensor:
    """(above, below) with `tanh(x) = above / below` to a relative 2e-6, also where x is small; a NaN stays one.

    A minimax fit of odd over even, without the branches and the many registers that exponentials need. Both are at most
    1, so that products of them overflow no earlier than the sigmoid does.
    """
    x = tl.clamp(x, -_FLAT, _FLAT, propagate_nan=tl.PropagateNan.ALL)
    y = x * x
    above = x * (((4.38648859e-8 * y + 2.51724136e-5) * y + 1.35265220e-3) * y + 1.09774702e-2)
    below = ((1.58059403e-6 * y + 2.32191815e-4) * y + 5.01172783e-3) * y + 1.09774816e-2
    return above, below


@jit
def round_to_bf16(x: tl.tensor) -> tl.tensor:
    """Float32 rounded to bfloat16, as float32."""
    return x.to(tl.bfloat16).to(tl.float32)


@jit
def power_of_two(exponent: tl.tensor) -> tl.tensor:
    """`2^exponent` for -126 <= exponent <= 127, from bits."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@jit
def store(
    y: tl.tensor,
    out_ptr: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    column: tl.tensor,
    columns: tl.tensor,
    WIDTH: tl.constexpr,
    TOTAL: tl.constexpr,
) -> tl.tensor:
    """Writes `y`, columns by WIDTH rows, to `[M, TOTAL]` from `row` and `column` on: `rows` rows, below `columns`."""
    r = tl.arange(0, WIDTH)
    c = column + tl.arange(0, y.shape[0])
    at = out_ptr + (row + r).to(tl.int64)[None, :] * TOTAL + c[:, None]
    tl.store(at, y.to(out_ptr.dtype.element_ty), mask=(r < rows)[None, :] & (c < columns)[:, None])
