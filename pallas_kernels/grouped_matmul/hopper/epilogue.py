"""From float32 accumulators to bfloat16 rows: scale, activation, and the turn from [N, rows] to [rows, N]."""

import dataclasses
import math
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import vector

from pallas_kernels.grouped_matmul.config import EPILOGUE_TOKENS, epilogue_bytes
from pallas_kernels.grouped_matmul.hopper.decode import SCALAR
from pallas_kernels.grouped_matmul.hopper.ptx import (
    Value,
    add,
    arith,
    both,
    constant,
    f32,
    global_address,
    i32,
    i64,
    left,
    less,
    load_shared_128,
    mul,
    ptx,
    ptx_if,
    right,
    scalar,
    shared_address,
    thread,
    utils,
    wide,
)
from pallas_kernels.situ import Activation, Situ


@dataclasses.dataclass(frozen=True)
class Store:
    """What is known of a store when the kernel is compiled."""

    width: int  # rows of x that the accumulators have
    activation: Activation | None
    out_columns: int

    @property
    def gated(self) -> bool:
        return self.activation is not None


def store(
    spec: Store, accumulators: list[Any], out_gmem: Any, turn_smem: Any, where: tuple[Any, ...], scales: Any
) -> None:
    """Stores one warpgroup's units: `where` is (warpgroup, first row, end of the rows, first output column, exponent).

    The accumulators count times 2^exponent and, where `scales` is a reference to float32 `[M]`, times the row's scale.
    Rows at and beyond the end are not touched.
    """
    units = len(accumulators)
    references = (out_gmem, turn_smem) if scales is None else (out_gmem, turn_smem, scales)

    @plgpu.inline_mgpu(
        arg_types=(
            *(plgpu.Layout.WGMMA for _ in accumulators),
            *(SCALAR for _ in where),
            *(plgpu.RefType() for _ in references),
        )
    )
    def emit(ctx: Any, *args: Any) -> None:
        del ctx
        registers = [a.registers.reshape(spec.width // 8, 2) for a in args[:units]]
        _Emitter(spec, registers, [scalar(v) for v in args[units : units + 5]], args[units + 5 :]).run()

    emit(*accumulators, *where, *references)


class _Emitter:
    """One store, 32 rows at a time: four 8 x 8 blocks a warp go transposed to shared memory, and 16 bytes a thread out.

    A thread holds, of each block of 8 rows of x, N row `lane / 4` of both halves and rows `2 * (lane % 4) + {0, 1}`.
    """

    def __init__(self, spec: Store, registers: list[Any], where: list[Value], refs: Any) -> None:
        self.spec, self.registers = spec, registers
        self.warpgroup, self.row, self.end, self.column, exponent = where
        self.factor = _power_of_two(exponent)
        self.columns = len(registers) * (32 if spec.gated else 64)  # the warpgroup's output columns
        self.pitch = self.columns * 2 + 16
        own = thread(volatile=True)
        self.own, self.lane, self.warp = own, both(own, 31), right(own, 5)
        self.out = global_address(refs[0])
        buffer = epilogue_bytes(len(registers), spec.gated)
        self.buffer = add(shared_address(refs[1]), mul(self.warpgroup, buffer))
        self.scales = global_address(refs[2]) if len(refs) == 3 else None
        self.factors: dict[tuple[int, int], Value] = {}

    def run(self) -> None:
        blocks = self.spec.width // 8
        step = EPILOGUE_TOKENS // 8
        for first in range(0, blocks, step):
            with utils.when(less(add(self.row, 8 * first), self.end)):
                self._chunk(first, min(step, blocks - first))

    def _chunk(self, first: int, count: int) -> None:
        self._barrier()  # the last chunk has been read
        if self.scales is not None:
            self._load_scales(first, count)
        for unit in range(len(self.registers)):
            for half in range(1 if self.spec.gated else 2):
                blocks = [self._block(unit, first + b, half) for b in range(count)]
                self._turn(unit, half, blocks + [constant(0)] * (4 - count))
        self._barrier()
        self._write(first, count)

    def _barrier(self) -> None:
        ptx("bar.sync $0, 128;", add(self.warpgroup, 1))

    def _load_scales(self, first: int, count: int) -> None:
        pair = add(self.row, left(both(self.lane, 3), 1))
        for block in range(first, first + count):
            for which in range(2):
                row = arith.minsi(add(pair, 8 * block + which), add(self.end, -1))
                address = arith.addi(self.scales, wide(left(row, 2)))
                scale = ptx("ld.global.f32 $0, [$1];", address, out=f32(), volatile=True)
                self.factors[block, which] = arith.mulf(scale, self.factor)

    def _rounded(self, unit: int, block: int, half: int) -> Value:
        """Two neighbouring rows' values of one N row, scaled and rounded to a pair of bfloat16."""
        values = []
        for which in range(2):
            value = vector.extract(self.registers[unit][block, half], dynamic_position=[], static_position=[which])
            values.append(arith.mulf(value, self.factors.get((block, which), self.factor)))
        return _pack(*values)

    def _block(self, unit: int, block: int, half: int) -> Value:
        activation = self.spec.activation
        if activation is None:
            return self._rounded(unit, block, half)
        gate, up = (_unpack(self._rounded(unit, block, which)) for which in range(2))
        return _pack(*(_activate(activation, g, u) for g, u in zip(gate, up, strict=True)))

    def _turn(self, unit: int, half: int, blocks: list[Value]) -> None:
        column = unit * 32 if self.spec.gated else unit * 64 + half * 8
        address = add(self.buffer, add(mul(self.lane, self.pitch), mul(self.warp, 16 if self.spec.gated else 32)))
        code = "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};"
        ptx(code, add(address, column * 2), *blocks)

    def _write(self, first: int, count: int) -> None:
        vectors = self.columns * 2 // 16
        at, row = both(self.own, vectors - 1), right(self.own, vectors.bit_length() - 1)
        for step in range(-(-count * 8 * vectors // 128)):
            token = add(row, step * (128 // vectors))
            data = load_shared_128(add(add(self.buffer, mul(token, self.pitch)), left(at, 4)))
            target = add(self.row, add(token, first * 8))
            line = arith.muli(wide(target), arith.constant(i64(), self.spec.out_columns * 2))
            address = arith.addi(line, wide(add(left(self.column, 1), left(at, 4))))
            code = "st.global.v4.b32 [$0], {$1, $2, $3, $4};"
            ptx_if(less(target, self.end), code, arith.addi(self.out, address), *data)


def _power_of_two(exponent: Value) -> Value:
    """2^exponent in float32 for -252 <= exponent <= 127, subnormals too: a normal power times what is missing."""
    normal = arith.maxsi(exponent, constant(-126))
    powers = [left(add(e, 127), 23) for e in (normal, arith.subi(exponent, normal))]
    return arith.mulf(*(arith.bitcast(f32(), bits) for bits in powers))


def _pack(low: Value, high: Value) -> Value:
    return ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", high, low, out=i32())


def _unpack(pair: Value) -> tuple[Value, Value]:
    low, high = (arith.bitcast(f32(), bits) for bits in (left(pair, 16), both(pair, 0xFFFF0000)))
    return low, high


def _scaled(value: Value, factor: float) -> Value:
    return arith.mulf(value, arith.constant(f32(), factor))


def _tanh(value: Value) -> Value:
    """The hardware's: relative error 2^-11 at most, near zero too."""
    return ptx("tanh.approx.f32 $0, $1;", value, out=f32())


def _activate(activation: Activation, gate: Value, up: Value) -> Value:
    power = ptx("ex2.approx.ftz.f32 $0, $1;", _scaled(gate, -math.log2(math.e)), out=f32())
    one_more = arith.addf(power, arith.constant(f32(), 1.0))
    sigmoid = ptx("rcp.approx.ftz.f32 $0, $1;", one_more, out=f32())
    if not isinstance(activation, Situ):
        return arith.mulf(arith.mulf(gate, sigmoid), up)
    bounded = arith.mulf(_scaled(_tanh(_scaled(gate, 1 / activation.beta)), activation.beta), sigmoid)
    if activation.linear_beta is None:
        return arith.mulf(bounded, up)
    return arith.mulf(bounded, _scaled(_tanh(_scaled(up, 1 / activation.linear_beta)), activation.linear_beta))
