"""Four-bit codes to wgmma operands in registers. `kernel_layout` has the picture of a unit and of a word."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_kernels.grouped_matmul.kernel_layout import UNIT_WORDS, Mma
from pallas_kernels.grouped_matmul.mosaic_parts.ptx import (
    Value,
    add,
    both,
    constant,
    either,
    i32,
    left,
    load_shared_32,
    load_shared_128,
    permute_bytes,
    ptx,
    right,
    scalar,
    shared_address,
    thread,
)

UNIT_BYTES = 4 * UNIT_WORDS
CODE_BYTES = 2048
SCALAR = plgpu.Layout.WG_SPLAT(())

# e4m3 bytes of the eight magnitudes at the least exponent (-5); the zero's byte never changes.
_LOW_MAGNITUDES = 0x14100800  # 1.5 1 0.5 0
_HIGH_MAGNITUDES = 0x24201C18  # 6 4 3 2


def decode(w_smem: Any, offset: Any, factors: tuple[Any, ...], mma: Mma) -> Any:
    """The unit (e4m3: two neighbours along K) `offset` bytes into `w_smem`, as the A operand of a wgmma.

    `factors` are `opaque_factors()`. bfloat16 `[64, 64]` or e4m3 `[64, 128]`, in wgmma's layout.
    """
    one = unit_bf16 if mma == "bf16" else _units_e4m3
    layout = plgpu.Layout.WGMMA if mma == "bf16" else plgpu.Layout.WGMMA_8BIT
    shape, dtype = ((64, 64), jnp.bfloat16) if mma == "bf16" else ((64, 128), jnp.float8_e4m3fn)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, *(SCALAR for _ in factors)),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=layout),
    )
    def emit(ctx: Any, w_smem: Value, offset: Any, *factors: Any) -> Any:
        del ctx
        base = add(shared_address(w_smem), scalar(offset))
        element = ir.BF16Type.get() if mma == "bf16" else ir.Float8E4M3FNType.get()
        operand = ir.VectorType.get((2 if mma == "bf16" else 4,), element)
        single = ir.VectorType.get((1,), i32())
        registers = np.empty((8, 2), object)
        for at, register in one(base, *(scalar(f) for f in factors)):
            registers[at] = vector.bitcast(operand, vector.broadcast(single, register))
        mgpu_layout = layout.to_mgpu()
        shaped = registers.reshape(mgpu_layout.registers_shape(shape))
        return mgpu.FragmentedArray(_registers=shaped, _layout=mgpu_layout, _is_signed=None)

    return emit(w_smem, offset, *factors)


def opaque_factors() -> tuple[Any, ...]:
    """(16, 64, 128) as scalars no compiler can see through.

    Shifts left by such factors stay multiplications, which run beside the logic unit; that unit limits the decode.
    """

    @plgpu.inline_mgpu(return_type=tuple(plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR) for _ in range(3)))
    def emit(ctx: Any) -> Any:
        del ctx
        zero = ptx("mov.u32 $0, %ctaid.z;", out=i32(), volatile=True)
        return tuple(mgpu.FragmentedArray.splat(add(zero, v), (), is_signed=True) for v in (16, 64, 128))

    return emit()


def _load(base: Value) -> tuple[Any, Value]:
    """This thread's four words of codes, and the word of their four scales."""
    own = thread()
    return load_shared_128(add(base, left(own, 4))), load_shared_32(add(add(base, both(own, 124)), CODE_BYTES))


def unit_bf16(base: Value, by16: Value, by64: Value, by128: Value) -> Any:
    """((column tile, half), register) for each bfloat16 pair of a unit."""
    words, scales = _load(base)
    for block in range(2):
        # The exponents of this block's scales, of both halves' rows, as a pair of bfloat16.
        pair_of_scales = _times(permute_bytes(scales, 0, 0x4140 + 0x0202 * block), by128)
        for half in range(2):
            for pair, bits in enumerate(_spread_bf16(words[2 * block + half], by16, by64)):
                yield (4 * block + pair, half), ptx(_scale_by(half), bits, pair_of_scales, out=i32())


def _scale_by(half: int) -> str:
    """A pair of bfloat16 times the lower or upper of another: the multiplication selects it, so that costs nothing."""
    take = f"mov.b32 {{s0, s1}}, $2; mov.b32 both, {{s{half}, s{half}}};"
    return f"{{ .reg .b16 s<2>; .reg .b32 both; {take} mul.rn.bf16x2 $0, $1, both; }}"


def _times(a: Value, factor: Value) -> Value:
    return ptx("mul.lo.u32 $0, $1, $2;", a, factor, out=i32())


def _spread_bf16(word: Value, by16: Value, by64: Value) -> tuple[Value, ...]:
    """Four pairs of bfloat16, each 2^-126 times its code."""
    mask = 0x81C081C0
    rotated = ptx("shf.r.wrap.b32 $0, $1, $1, 6;", word, out=i32())
    last = either(both(_times(word, by16), 0x81808180), both(right(word, 4), 0x00400040))
    return both(word, mask), both(_times(word, by64), mask), both(rotated, mask), last


def _units_e4m3(base: Value) -> Any:
    """((column tile, half), register) for each four e4m3 values of two neighbouring units."""
    loaded = [_load(add(base, q * UNIT_BYTES)) for q in range(2)]
    for q, (words, scales) in enumerate(loaded):
        for i, word in enumerate(words):
            block, half = divmod(i, 2)
            exponent = permute_bytes(scales, 0, 0x4440 | i)
            for j, register in enumerate(_look_up_e4m3(word, exponent)):
                yield (4 * q + 2 * block + j, half), register


def _look_up_e4m3(word: Value, exponent: Value) -> tuple[Value, Value]:
    """Eight codes as two registers of four e4m3 bytes; `exponent` is 8 * (the block's exponent + 5)."""
    low = ptx("mad.lo.u32 $0, $1, 0x01010100, $2;", exponent, constant(_LOW_MAGNITUDES), out=i32())
    high = ptx("mad.lo.u32 $0, $1, 0x01010101, $2;", exponent, constant(_HIGH_MAGNITUDES), out=i32())
    selector = both(word, 0x77777777)
    first = either(permute_bytes(low, high, selector), both(word, 0x80808080))
    second = either(permute_bytes(low, high, right(selector, 16)), both(left(word, 4), 0x80808080))
    return first, second
