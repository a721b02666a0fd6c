"""Runs the PTX of one kernel in NumPy, so that what the compiler made of it is known without a GPU.

All threads of all blocks are lanes of one array `[warps, 32]` a register. Warps that stand at the same instruction take
it together, those that are furthest behind first; a warp's 32 lanes must agree on every branch.

What it knows of PTX: integers of 16 to 64 bits and predicates, float32 sums, products, quotients, roots and rounding to
bfloat16, `fma.rn.f32` (rounded twice, by way of float64: right where the sum is exact), loads of inputs and stores of
outputs in words of 32 bits and vectors of them, one static barrier, a table of words in shared memory, and what a warp
does together (redux, vote, shfl). Anything else raises `NotImplementedError`. What a GPU would let pass raises
`AssertionError`: an access out of bounds or misaligned, a load of an output, a second store to one word, a shared word
that is read before it is written, or that two lanes write with no barrier between. What a lane reads of a shared word
that another wrote, with no barrier since, is `GARBAGE`. A store that overtakes another lane's load is not noticed.
"""

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from ptx_program import Instruction, Program, parsed

Lanes = NDArray[Any]  # [warps, 32]: uint64, of which a register of 32 bits has the lower ones, or bool

GARBAGE = 0xDEAD_BEEF
MOST_STEPS = 200_000  # of a kernel that ends
_ARRAY = 36  # bits of an address within an array; those above them are the array's number
_TABLE = 1024  # the address of shared memory
_SETTLED, _UNWRITTEN = -1, -2  # writers of a shared word: any that a barrier separates from now, and none


class Output(NamedTuple):
    """An output's words, uint32, and which of them were written."""

    words: NDArray[Any]
    written: NDArray[Any]


def run(ptx: str, inputs: Sequence[NDArray[Any]], sizes: Sequence[int], blocks: int, table_words: int) -> list[Output]:
    """The outputs, of so many words each, after so many blocks with a table each of so many words in shared memory."""
    program = parsed(ptx)
    assert len(program.parameters) == len(inputs) + len(sizes), program.parameters
    return _Grid(program, inputs, sizes, blocks, table_words).run()


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


def _of_float32(function: Callable[..., Any]) -> Callable[..., Lanes]:
    """A function of float32, on their bits."""

    def on_bits(*lanes: Lanes) -> Lanes:
        with np.errstate(all="ignore"):
            result = function(*(each.astype(np.uint32).view(np.float32) for each in lanes))
        return result.view(np.uint32)

    return on_bits


def _two_rounded(upper: Lanes, lower: Lanes) -> Lanes:
    """Of float32, to bfloat16."""
    halves = (each.astype(jnp.bfloat16).view(np.uint16).astype(np.uint32) for each in (lower, upper))
    return next(halves) | next(halves) << np.uint32(16)


def _multiplied_and_added(x: Lanes, y: Lanes, z: Lanes) -> Lanes:
    """A product of two float32 has 48 bits at most, so only the sum is rounded, and then once more."""
    x, y, z = (lanes.astype(np.float64) for lanes in (x, y, z))
    return (x * y + z).astype(np.float32)


# By the opcode without its last part, the type of its operands: sign-extended to int64 if they are signed.
_COMPUTED: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("mov", "cvt.u16", "cvt.u32", "cvt.u64"), lambda x: x),
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
_OF_ONE_TYPE: dict[str, Callable[..., Any]] = {
    "div.u32": lambda x, y: np.where(y == 0, np.uint64(GARBAGE), x // np.maximum(y, np.uint64(1))),
    "mul.hi.u32": lambda x, y: x * y >> np.uint64(32),
    "mul.hi.u64": _upper_half,
    "bfe.u32": lambda x, start, length: x >> start & (np.uint64(1) << length) - np.uint64(1),
    "add.rn.f32": _of_float32(operator.add),
    "mul.rn.f32": _of_float32(operator.mul),
    "div.rn.f32": _of_float32(operator.truediv),
    "rsqrt.approx.f32": _of_float32(lambda x: np.float32(1) / np.sqrt(x)),
    "cvt.rn.bf16x2.f32": _of_float32(_two_rounded),
    "fma.rn.f32": _of_float32(_multiplied_and_added),
    "selp.f32": _COMPUTED["selp"],
}
_AGREED: dict[str, Callable[..., Any]] = {"add": np.sum, "max": np.max, "min": np.min}


class _Grid:
    """The state of all blocks of a launch."""

    def __init__(
        self, program: Program, inputs: Sequence[NDArray[Any]], sizes: Sequence[int], blocks: int, table_words: int
    ) -> None:
        self.program = program
        self.warps_a_block = program.threads // 32
        self.shape = blocks * self.warps_a_block, 32
        warp = np.arange(self.shape[0])[:, None]
        lane = np.arange(32, dtype=np.uint64)
        self.block = np.broadcast_to(warp // self.warps_a_block, self.shape)
        self.registers: dict[str, Lanes] = {
            "%tid.x": (warp % self.warps_a_block * 32).astype(np.uint64) + lane,
            "%ctaid.x": self.block.astype(np.uint64),
            "%lanemask_lt": np.broadcast_to((np.uint64(1) << lane) - np.uint64(1), self.shape),
            "__dynamic_shmem__0": np.full(self.shape, _TABLE, np.uint64),
        }
        words = [np.ascontiguousarray(array).reshape(-1).view(np.uint32) for array in inputs]
        self.num_inputs = len(words)
        self.lengths = np.array([*map(len, words), *sizes])
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.memory = np.concatenate([*words, np.full(sum(sizes), GARBAGE, np.uint32)])
        self.stores = np.zeros(len(self.memory), int)
        self.table_words = table_words
        self.table = np.zeros(blocks * table_words, np.uint64)
        self.writer_warp = np.full(len(self.table), _UNWRITTEN)
        self.writer_lane = np.full(len(self.table), _SETTLED)

    def run(self) -> list[Output]:
        code, end = self.program.code, len(self.program.code)
        targets = set(self.program.labels.values())
        at = np.zeros(self.shape[0], int)
        waiting = np.zeros(self.shape[0], bool)
        steps = 0
        while (at < end).any():
            if waiting.any() and not (~waiting & (at < end)).any():
                self._end_barrier(waiting)
                waiting[:] = False
            here = int(at[~waiting & (at < end)].min())
            self.active = (at == here) & ~waiting
            while True:
                step, here, steps = code[here], here + 1, steps + 1
                assert steps < MOST_STEPS, "the kernel does not end"
                if step.opcode == "ret" and step.guard is None:
                    here = end
                elif step.opcode == "bar.sync" and step.guard is None and step.arguments == ["0"]:
                    waiting |= self.active
                elif step.opcode in ("bra", "bra.uni"):
                    taken = self._lanes(step)[:, 0] & self.active
                    assert (self._lanes(step).sum(1)[self.active] % 32 == 0).all(), "lanes of a warp part"
                    at[taken] = self.program.labels[step.arguments[0]]
                    self.active &= ~taken
                else:
                    self._execute(step)
                    if here not in targets:
                        continue
                at[self.active] = here
                break
        bounds = [slice(s, s + n) for s, n in zip(self.starts, self.lengths, strict=True)][self.num_inputs :]
        return [Output(self.memory[part], self.stores[part] == 1) for part in bounds]

    def _end_barrier(self, waiting: NDArray[Any]) -> None:
        assert waiting.all(), "a warp ended while others of its grid wait"
        self.writer_warp[self.writer_warp != _UNWRITTEN] = _SETTLED

    def _lanes(self, step: Instruction) -> Lanes:
        """Those that take the instruction."""
        lanes = np.broadcast_to(self.active[:, None], self.shape)
        return lanes if step.guard is None else lanes & (self.registers[step.guard] ^ step.unless)

    def _value(self, name: str, bits: int = 64) -> Lanes:
        if name in self.registers:
            return self.registers[name]
        number = int("0x" + name[2:], 16) if re.match("0f", name) else int(name, 0)
        return np.full(self.shape, number & ((1 << bits) - 1), np.uint64)

    def _set(self, name: str, value: Any, on: Lanes, bits: int = 32) -> None:
        value = np.broadcast_to(value, self.shape)
        if value.dtype != bool:
            value = value.astype(np.uint64) & np.uint64((1 << bits) - 1)
        old = self.registers.get(name, np.zeros((), value.dtype))
        self.registers[name] = value if on.all() else np.where(on, value, old)

    def _execute(self, step: Instruction) -> None:
        on, opcode, parts = self._lanes(step), step.opcode, step.opcode.split(".")
        base, kind = ".".join(parts[:-1]), parts[-1]
        arguments = step.arguments
        if opcode in _OF_ONE_TYPE or (base in _COMPUTED and re.fullmatch(r"[usb](16|32|64)|pred", kind)):
            self._compute(_OF_ONE_TYPE.get(opcode) or _COMPUTED[base], base, kind, arguments, on)
        elif opcode == "ld.param::entry.b64":
            array = self.program.parameters.index(arguments[1][1:-1])
            self._set(arguments[0], np.uint64((array + 1) << _ARRAY), on, 64)
        elif vector := re.fullmatch(r"(ld\.global(?:\.nc)?(?:\.L1::\w+)?|st\.global)(?:\.v([24]))?\.b32", opcode):
            self._reach(vector[1] == "st.global", int(vector[2] or 1), arguments, on)
        elif opcode == "st.shared.b32":
            self._store_shared(arguments, on)
        elif opcode == "ld.shared.b32":
            self._load_shared(arguments, on)
        elif parts[1:2] == ["sync"] or opcode == "bar.warp.sync":
            assert step.guard is None, "a part of a warp does what is for all of it"
            self._together(opcode, arguments, on)
        elif opcode != "fence.mbarrier_init.release.cluster":  # of barriers that no kernel here has
            raise NotImplementedError(f"{opcode} {arguments}")

    def _compute(self, function: Callable[..., Any], base: str, kind: str, arguments: list[Any], on: Lanes) -> None:
        bits = 64 if kind == "pred" else int(kind[1:])
        values = [self._value(name, bits) for name in arguments[1:]]
        if kind == "pred":
            values = [x != 0 for x in values]
        elif kind[0] == "s":
            values = [x.view(np.int64) << 64 - bits >> 64 - bits for x in values]
        result = {"mul.wide": 2 * bits, "popc": 32, "cvt.u16": 16, "cvt.u32": 32, "cvt.u64": 64}.get(base, bits)
        self._set(arguments[0], function(*values), on, result)

    def _address(self, name: str) -> NDArray[Any]:
        base, _, offset = name[1:-1].partition("+")
        return self._value(base).astype(np.int64) + int(offset or 0)

    def _reach(self, stores: bool, width: int, arguments: list[Any], on: Lanes) -> None:
        """Loads of inputs, or stores to outputs, of so many neighbouring words."""
        place, names = arguments if stores else arguments[::-1]
        names = names if width > 1 else [names]
        address = self._address(place)[on]
        array, offset = (address >> _ARRAY) - 1, address & ((1 << _ARRAY) - 1)
        assert ((array >= 0) & (array < len(self.lengths))).all(), "not within an array"
        assert ((array >= self.num_inputs) == stores).all(), "a load of an output, or a store to an input"
        assert not (offset % (4 * width)).any(), "misaligned"
        assert (offset // 4 + width <= self.lengths[array]).all(), "beyond the end of an array"
        for i, name in enumerate(names):
            word = self.starts[array] + offset // 4 + i
            if stores:
                self.memory[word] = self._value(name, 32)[on]
                np.add.at(self.stores, word, 1)
                assert (self.stores[word] == 1).all(), "a word is stored twice"
            else:
                loaded = np.zeros(self.shape, np.uint64)
                loaded[on] = self.memory[word]
                self._set(name, loaded, on)

    def _shared_words(self, name: str, on: Lanes) -> tuple[NDArray[Any], NDArray[Any]]:
        """Places in the tables of all blocks, and whether another lane wrote there with no barrier since."""
        address = self._address(name)[on] - _TABLE
        assert not (address % 4).any(), "misaligned"
        assert ((address >= 0) & (address < 4 * self.table_words)).all(), "beyond the end of shared memory"
        word = self.block[on] * self.table_words + address // 4
        warp, lane = np.nonzero(on)
        by_warp, by_lane = self.writer_warp[word], self.writer_lane[word]
        return word, (by_warp >= 0) & ((by_warp != warp) | ((by_lane >= 0) & (by_lane != lane)))

    def _store_shared(self, arguments: list[Any], on: Lanes) -> None:
        word, unordered = self._shared_words(arguments[0], on)
        assert not unordered.any(), "a lane stores to a shared word that another wrote, with no barrier between"
        assert len(np.unique(word)) == len(word), "two lanes store to a shared word at once"
        self.table[word] = self._value(arguments[1], 32)[on]
        self.writer_warp[word], self.writer_lane[word] = np.nonzero(on)

    def _load_shared(self, arguments: list[Any], on: Lanes) -> None:
        word, unordered = self._shared_words(arguments[1], on)
        assert (self.writer_warp[word] != _UNWRITTEN).all(), "a shared word is read that nobody wrote"
        loaded = np.zeros(self.shape, np.uint64)
        loaded[on] = np.where(unordered, GARBAGE, self.table[word])
        self._set(arguments[0], loaded, on)

    def _together(self, opcode: str, arguments: list[Any], on: Lanes) -> None:
        """What all lanes of a warp do at once."""
        name, mask = arguments[0], int(arguments[-1], 0)
        value: Any = self._value(arguments[1], 32) if len(arguments) > 2 else None
        if mask not in (-1, 0xFFFF_FFFF):
            raise NotImplementedError(f"{opcode} of a part of a warp, {arguments}")
        if opcode == "bar.warp.sync":
            self.writer_lane[np.isin(self.writer_warp, np.nonzero(self.active)[0])] = _SETTLED
        elif opcode == "elect.sync":  # which lane is chosen is not said: here it is the first
            self._set(name[0], 0, on)
            self._set(name[1], np.arange(32) == 0, on)
        elif agreed := re.fullmatch(r"redux\.sync\.(add|max|min)\.u32", opcode):
            self._set(name, _AGREED[agreed[1]](value, axis=1, keepdims=True), on)
        elif opcode == "vote.sync.ballot.b32":
            self._set(name, (value << np.arange(32, dtype=np.uint64)).sum(1, keepdims=True), on)
        elif opcode in ("shfl.sync.idx.b32", "shfl.sync.bfly.b32") and arguments[3] == "31":
            lane = self._value(arguments[2]).astype(int)
            lane = lane ^ np.arange(32) if opcode == "shfl.sync.bfly.b32" else lane
            self._set(name, np.take_along_axis(value, lane, 1), on)
        elif opcode == "shfl.sync.up.b32" and arguments[3] == "0":
            lane = np.arange(32) - self._value(arguments[2]).astype(int)
            self._set(name[0], np.where(lane < 0, value, np.take_along_axis(value, np.maximum(lane, 0), 1)), on)
            self._set(name[1], lane >= 0, on)
        else:
            raise NotImplementedError(f"{opcode} {arguments}")
