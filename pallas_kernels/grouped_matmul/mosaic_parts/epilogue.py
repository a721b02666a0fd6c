"""From float32 accumulators to rows of the result: scale, activation, format, and the turn from [N, rows] to [rows, N].

bf16    rounded
f32     as it is (gate and up are rounded to bfloat16 before an activation, in every format)
mxfp8   rounded to bfloat16, then each 32 columns divided by their scale and rounded to E4M3
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import vector

from pallas_kernels.e8m0 import BLOCK
from pallas_kernels.grouped_matmul.config import EPILOGUE_TOKENS, epilogue_bytes
from pallas_kernels.grouped_matmul.kernel_layout import UNIT_ROWS
from pallas_kernels.grouped_matmul.mosaic_parts.decode import SCALAR
from pallas_kernels.grouped_matmul.mosaic_parts.geometry import WrittenFormat
from pallas_kernels.grouped_matmul.mosaic_parts.ptx import (
    Value,
    add,
    arith,
    both,
    constant,
    equal,
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
from pallas_kernels.grouped_matmul.mosaic_parts.values import (
    activate,
    encode_e4m3,
    largest_magnitude,
    largest_of_lanes,
    pack,
    scale_byte,
    unpack,
)
from pallas_kernels.situ import Activation


@dataclasses.dataclass(frozen=True)
class Store:
    """What is known of a store when the kernel is compiled."""

    width: int  # rows of x that the accumulators have
    activation: Activation | None
    out_columns: int
    out_format: WrittenFormat
    partial: bool = False  # whether a tile may end within a warpgroup's columns, a multiple of 8

    @property
    def gated(self) -> bool:
        return self.activation is not None

    @property
    def turned_bytes(self) -> int:
        """Bytes of a value while it is turned round in shared memory."""
        return 4 if self.out_format == "f32" else 2

    @property
    def tokens(self) -> int:
        """Rows turned round at a time, as many as the buffer holds."""
        return EPILOGUE_TOKENS * 2 // self.turned_bytes


def store(
    spec: Store,
    accumulators: list[Any],
    out_gmem: Sequence[Any],
    turn_smem: Any,
    where: tuple[Any, ...],
    scales: Any,
    addend: Any = None,
) -> None:
    """Stores one warpgroup's units: `where` is (warpgroup, first row, end of the rows, first output column, exponent)
    and, where the store is partial, the end of the tile's columns.

    An accumulator is one unit's, in the layout of `wgmma`, or two units', in that of tensor memory. It counts times
    2^exponent and, where `scales` is a reference to float32 `[M]`, times the row's scale.
    To the result, in bfloat16, is added `addend`, where that is a reference to bfloat16 as large as the result.
    `out_gmem` is the result or, for MXFP8, its values and its scales. Rows at and beyond the end are not touched.
    """
    count = len(accumulators)
    layout = plgpu.Layout.WGMMA if accumulators[0].shape[0] == UNIT_ROWS else plgpu.Layout.TCGEN05
    references = (turn_smem, *out_gmem, *(each for each in (scales, addend) if each is not None))

    @plgpu.inline_mgpu(
        arg_types=(
            *(layout for _ in accumulators),
            *(SCALAR for _ in where),
            *(plgpu.RefType() for _ in references),
        )
    )
    def emit(ctx: Any, *args: Any) -> None:
        del ctx
        of_units = [a.registers.reshape(spec.width // 8, -1, 2).swapaxes(0, 1) for a in args[:count]]
        registers = [unit for of_unit in of_units for unit in of_unit]
        values = [scalar(v) for v in args[count : count + len(where)]]
        turn, *rest = args[count + len(where) :]
        out, others = rest[: len(out_gmem)], iter(rest[len(out_gmem) :])
        row_scales, added = (None if each is None else next(others) for each in (scales, addend))
        _Emitter(spec, registers, values, turn, out, row_scales, added).run()

    emit(*accumulators, *where, *references)


class _Emitter:
    """One store, up to 32 rows at a time: blocks of 8 x 8 go transposed to shared memory, and from there out.

    A thread holds, of each block of 8 rows of x, N row `lane / 4` of both halves and rows `2 * (lane % 4) + {0, 1}`.
    """

    def __init__(
        self,
        spec: Store,
        registers: list[Any],
        where: list[Value],
        turn: Value,
        out: list[Value],
        scales: Any,
        addend: Any,
    ) -> None:
        self.spec, self.registers = spec, registers
        self.warpgroup, self.row, self.end, self.column, exponent = where[:5]
        self.column_end = where[5] if spec.partial else None
        self.factor = _power_of_two(exponent)
        self.columns = len(registers) * (32 if spec.gated else 64)  # the warpgroup's output columns
        self.pitch = self.columns * spec.turned_bytes + 16
        own = thread(volatile=True)
        self.own, self.lane, self.warp = own, both(own, 31), right(own, 5)
        self.out = [global_address(ref) for ref in out]
        buffer = epilogue_bytes(len(registers), spec.gated)
        assert spec.tokens * self.pitch <= buffer
        self.buffer = add(shared_address(turn), mul(self.warpgroup, buffer))
        self.scales = None if scales is None else global_address(scales)
        assert addend is None or spec.out_format == "bf16"
        self.addend = None if addend is None else global_address(addend)
        self.factors: dict[tuple[int, int], Value] = {}

    def run(self) -> None:
        blocks = self.spec.width // 8
        step = self.spec.tokens // 8
        for first in range(0, blocks, step):
            with utils.when(less(add(self.row, 8 * first), self.end)):
                self._chunk(first, min(step, blocks - first))

    def _chunk(self, first: int, count: int) -> None:
        addends = self._load_addends(first, count)  # which the way through shared memory hides
        self._barrier()  # the last chunk has been read
        if self.scales is not None:
            self._load_scales(first, count)
        for unit in range(len(self.registers)):
            for half in range(1 if self.spec.gated else 2):
                blocks = [self._results(unit, first + b, half) for b in range(count)]
                if self.spec.out_format == "f32":
                    self._turn_words(unit, half, blocks)
                else:
                    pairs = [pack(*block) for block in blocks]
                    self._turn_pairs(unit, half, pairs + [constant(0)] * (4 - count))
        self._barrier()
        self._write(first, count, addends)

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

    def _results(self, unit: int, block: int, half: int) -> Sequence[Value]:
        """Two neighbouring rows' float32 results of one output column."""
        activation = self.spec.activation
        if activation is None:
            return self._scaled(unit, block, half)
        gate, up = (unpack(pack(*self._scaled(unit, block, which))) for which in range(2))
        return [activate(activation, g, u) for g, u in zip(gate, up, strict=True)]

    def _scaled(self, unit: int, block: int, half: int) -> Sequence[Value]:
        """Two neighbouring rows' sums of one N row."""
        pair = self.registers[unit][block, half]
        values = [vector.extract(pair, dynamic_position=[], static_position=[which]) for which in range(2)]
        return [arith.mulf(v, self.factors.get((block, which), self.factor)) for which, v in enumerate(values)]

    def _turn_pairs(self, unit: int, half: int, blocks: list[Value]) -> None:
        address = add(self._turned(unit, half), mul(self.lane, self.pitch))
        ptx("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};", address, *blocks)

    def _turn_words(self, unit: int, half: int, blocks: list[Sequence[Value]]) -> None:
        """A word at a time: the pitch puts the 8 columns and 4 rows that a warp stores at once into different banks."""
        own_row, own_column = mul(both(self.lane, 3), 2 * self.pitch), left(right(self.lane, 2), 2)
        address = add(self._turned(unit, half), add(own_row, own_column))
        for block, values in enumerate(blocks):
            for which, value in enumerate(values):
                ptx("st.shared.f32 [$0], $1;", add(address, (8 * block + which) * self.pitch), value)

    def _turned(self, unit: int, half: int) -> Value:
        """Where in the buffer the warp's 8 columns of the first row are."""
        column = unit * 32 if self.spec.gated else unit * 64 + half * 8
        warp = mul(self.warp, (8 if self.spec.gated else 16) * self.spec.turned_bytes)
        return add(add(self.buffer, column * self.spec.turned_bytes), warp)

    def _write(self, first: int, count: int, addends: list[Sequence[Value]]) -> None:
        for step in range(self._steps(count)):
            token, at = self._place(step)
            data = load_shared_128(add(add(self.buffer, mul(token, self.pitch)), left(at, 4)))
            if addends:
                data = [_sum(*pairs) for pairs in zip(data, addends[step], strict=True)]
            target = add(self.row, add(token, first * 8))
            if self.spec.out_format == "mxfp8":
                self._write_mxfp8(target, at, data)
                continue
            address = self._address_of_16(self.out[0], target, at)
            ptx_if(self._inside(target, at), "st.global.v4.b32 [$0], {$1, $2, $3, $4};", address, *data)

    def _steps(self, count: int) -> int:
        """In how many steps the warpgroup writes so many blocks of 8 rows, 16 bytes a thread in each."""
        return -(-count * 8 * self._vectors // 128)

    @property
    def _vectors(self) -> int:
        """Of 16 bytes in a row; three units have no power of two."""
        return self.columns * self.spec.turned_bytes // 16

    def _place(self, step: int) -> tuple[Value, Value]:
        """Which row of those turned round is the thread's in a step, and which 16 bytes of it."""
        place = add(self.own, 128 * step)
        return arith.divui(place, constant(self._vectors)), arith.remui(place, constant(self._vectors))

    def _load_addends(self, first: int, count: int) -> list[Sequence[Value]]:
        """Four pairs for each step of `_write`; where that writes nothing, the addend's first ones, which exist."""
        addends: list[Sequence[Value]] = []
        for step in range(self._steps(count) if self.addend is not None else 0):
            token, at = self._place(step)
            target = add(self.row, add(token, first * 8))
            own = self._address_of_16(self.addend, target, at)
            address = arith.select(self._inside(target, at), own, self.addend)
            code = "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];"
            addends.append(ptx(code, address, out=[i32()] * 4, volatile=True))
        return addends

    def _inside(self, target: Value, at: Value) -> Value:
        """Whether 16 bytes of a row are of the tile."""
        inside = less(target, self.end)
        if self.column_end is None:
            return inside
        column = add(self.column, mul(at, 16 // self.spec.turned_bytes))
        return arith.andi(inside, less(column, self.column_end))

    def _write_mxfp8(self, target: Value, at: Value, pairs: Sequence[Value]) -> None:
        """8 columns of a row; four neighbouring threads hold a block."""
        lanes = BLOCK // 8
        byte = scale_byte(largest_of_lanes(largest_magnitude(pairs), lanes))
        inside = less(target, self.end)
        column = add(self.column, left(at, 3))
        address = self._address(self.out[0], target, self.spec.out_columns, column)
        ptx_if(inside, "st.global.v2.b32 [$0], {$1, $2};", address, *encode_e4m3(pairs, byte))
        scale = right(column, BLOCK.bit_length() - 1)
        address = self._address(self.out[1], target, self.spec.out_columns // BLOCK, scale)
        first = arith.andi(inside, equal(both(at, lanes - 1), 0))
        ptx_if(first, "st.global.u8 [$0], $1;", address, byte)

    def _address_of_16(self, array: Value, row: Value, at: Value) -> Value:
        """Of 16 bytes of a row of `array`, which is as large as the result."""
        column_bytes = add(mul(self.column, self.spec.turned_bytes), left(at, 4))
        return self._address(array, row, self.spec.turned_bytes * self.spec.out_columns, column_bytes)

    def _address(self, array: Value, row: Value, row_bytes: int, column_bytes: Value) -> Value:
        line = arith.muli(wide(row), arith.constant(i64(), row_bytes))
        return arith.addi(array, arith.addi(line, wide(column_bytes)))


def _sum(pair: Value, other: Value) -> Value:
    """Of two pairs of bfloat16, rounded from float32."""
    return pack(*(arith.addf(a, b) for a, b in zip(unpack(pair), unpack(other), strict=True)))


def _power_of_two(exponent: Value) -> Value:
    """2^exponent in float32 for -252 <= exponent <= 127, subnormals too: a normal power times what is missing."""
    normal = arith.maxsi(exponent, constant(-126))
    powers = [left(add(e, 127), 23) for e in (normal, arith.subi(exponent, normal))]
    return arith.mulf(*(arith.bitcast(f32(), bits) for bits in powers))
