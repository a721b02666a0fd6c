"""The few PTX instructions and integer operations that Mosaic's kernels are written in, below Pallas's own vocabulary.

Everything here runs while Mosaic lowers a kernel: values are MLIR values of one thread.
"""

from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils as _utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as _arith
from jaxlib.mlir.dialects import llvm
from jaxlib.mlir.dialects import scf as _scf

Value = Any  # an MLIR value

# The bindings' annotations are of generated code, narrower than what the functions take.
arith: Any = _arith
scf: Any = _scf
utils: Any = _utils


def i32() -> Value:
    return ir.IntegerType.get_signless(32)


def i64() -> Value:
    return ir.IntegerType.get_signless(64)


def f32() -> Value:
    return ir.F32Type.get()


def constant(value: int) -> Value:
    """A 32-bit constant; negative or unsigned alike."""
    value &= 0xFFFF_FFFF
    return arith.constant(i32(), ir.IntegerAttr.get(i32(), value - (1 << 32) if value >> 31 else value))


def word(value: Value | int) -> Value:
    return constant(value) if isinstance(value, int) else value


def ptx(code: str, *args: Value, out: Value | Sequence[Value] | None = None, volatile: bool = False) -> Any:
    """Inline PTX; without results, or volatile, it stays where it is written."""
    return utils.inline_ptx(code, *args, result_types=out, has_side_effects=volatile or out is None)


def ptx_if(condition: Value, code: str, *args: Value) -> None:
    """One PTX instruction without result, under a predicate."""
    utils.inline_ptx(code, *args, predicate=condition)


def add(a: Value, b: Value | int) -> Value:
    return arith.addi(a, word(b))


def mul(a: Value, b: Value | int) -> Value:
    return arith.muli(a, word(b))


def both(a: Value, b: Value | int) -> Value:
    return arith.andi(a, word(b))


def either(a: Value, b: Value) -> Value:
    return arith.ori(a, b)


def left(a: Value, bits: int) -> Value:
    return arith.shli(a, constant(bits))


def right(a: Value, bits: int) -> Value:
    return arith.shrui(a, constant(bits))


def equal(a: Value, b: Value | int) -> Value:
    return arith.cmpi(arith.CmpIPredicate.eq, a, word(b))


def less(a: Value, b: Value | int) -> Value:
    """Signed `a < b`."""
    return arith.cmpi(arith.CmpIPredicate.slt, a, word(b))


def wide(a: Value) -> Value:
    """A non-negative 32-bit value in 64 bits."""
    return arith.extui(i64(), a)


def permute_bytes(a: Value, b: Value | int, selector: Value | int) -> Value:
    """Four bytes of `a` (0..3) and `b` (4..7), the lowest chosen by the lowest nibble of `selector`."""
    return ptx("prmt.b32 $0, $1, $2, $3;", a, word(b), word(selector), out=i32())


def scalar(array: Any) -> Value:
    """The MLIR value of a scalar argument of `inline_mgpu`."""
    return array.registers.item()


def shared_address(ref: Value) -> Value:
    """The 32-bit address of a reference into shared memory."""
    return arith.trunci(i32(), llvm.ptrtoint(i64(), utils.memref_ptr(ref)))


def global_address(ref: Value) -> Value:
    """The 64-bit address of a reference into global memory."""
    return llvm.ptrtoint(i64(), utils.memref_ptr(ref))


def thread(volatile: bool = False) -> Value:
    """The thread's index in its warpgroup; volatile: read where it is used, so that it occupies no register before."""
    return both(ptx("mov.u32 $0, %tid.x;", out=i32(), volatile=volatile), 127)


def uniform(value: Value) -> Value:
    """Lane 0's value, which the compiler then knows to be the warp's."""
    return ptx("shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", value, out=i32(), volatile=True)


def load_shared_128(address: Value) -> Sequence[Value]:
    return ptx("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", address, out=[i32()] * 4, volatile=True)


def load_shared_32(address: Value) -> Value:
    return ptx("ld.shared.b32 $0, [$1];", address, out=i32(), volatile=True)


def await_phase(barrier: Value, parity: Value) -> None:
    """Waits until the barrier at a shared address has completed the phase of this parity."""
    ptx(
        """{
.reg .pred done;
AWAIT_${:uid}:
mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;
@done bra.uni DONE_${:uid};
bra.uni AWAIT_${:uid};
DONE_${:uid}:
}""",
        barrier,
        parity,
    )
