"""Runs the PTX of one kernel in NumPy, so that what the compiler made of it is known without a GPU.

All threads of all blocks are lanes of one array `[warps, 32]` a register. Warps that stand at the same instruction take
it together, those that are furthest behind first; a warp's 32 lanes must agree on every branch.

What it knows of PTX: the arithmetic of `ptx_arithmetic`, loads of inputs and stores of outputs in words of 32 bits and
vectors of them, loads of 64 bits, stores of bytes, barriers of a block or of some of its warps, one array of words in
shared memory, and what a warp does together (redux, vote, shfl, stmatrix). Anything else raises `NotImplementedError`.
What a GPU would let pass raises `AssertionError`: an access out of bounds or misaligned, a load of an output, a second
store to one byte, a shared word that is read before it is written, or that a lane writes after another wrote it or
another warp read it, with no barrier between. What a lane reads of a shared word that another wrote, with no barrier
since, is `GARBAGE`.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from ptx_arithmetic import AGREED, COMPUTED, GARBAGE, OF_ONE_TYPE, Lanes
from ptx_program import Instruction, Program, parsed
from ptx_shared_memory import SharedMemory

MOST_STEPS = 200_000  # of a kernel that ends
_ARRAY = 36  # bits of an address within an array; those above them are the array's number
_TABLE = 1024  # the address of shared memory
_LOAD, _WORDS = r"ld(?:\.global(?:\.nc)?(?:\.L1::\w+)?)?", r"(?:\.v([24]))?\.[bf]32"
_BARRIERS, _NO_BARRIER = 16, -1  # of a block, and none of them


class Output(NamedTuple):
    """An output's words, uint32 `[words]`, and which of their bytes were written, `[words, 4]`."""

    words: NDArray[Any]
    written: NDArray[Any]


class Launch(NamedTuple):
    """Blocks, words of shared memory of each, and which of the inputs and outputs each of the parameters is."""

    blocks: int
    shared_words: int
    parameters: Sequence[int]


def run(ptx: str, inputs: Sequence[NDArray[Any]], sizes: Sequence[int], launch: Launch) -> list[Output]:
    """The outputs, of so many words each."""
    program = parsed(ptx)
    assert len(program.parameters) == len(launch.parameters) == len(inputs) + len(sizes), program.parameters
    return _Grid(program, inputs, sizes, launch).run()


class _Grid:
    """The state of all blocks of a launch."""

    def __init__(self, program: Program, inputs: Sequence[NDArray[Any]], sizes: Sequence[int], launch: Launch) -> None:
        self.program = program
        self.arrays = dict(zip(program.parameters, launch.parameters, strict=True))
        self.warps_a_block = program.threads // 32
        self.shape = launch.blocks * self.warps_a_block, 32
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
        self.stores = np.zeros((len(self.memory), 4), int)  # of its bytes
        self.shared = SharedMemory(_TABLE, launch.blocks, self.warps_a_block, launch.shared_words)
        self.barrier = np.full(self.shape[0], _NO_BARRIER)  # that a warp waits at
        self.awaited = np.zeros(self.shape[0], int)  # warps that must meet there

    def run(self) -> list[Output]:
        code, end = self.program.code, len(self.program.code)
        targets = set(self.program.labels.values())
        at = np.zeros(self.shape[0], int)
        steps = 0
        while (at < end).any():
            ready = (self.barrier == _NO_BARRIER) & (at < end)
            assert ready.any(), "warps wait at a barrier that others never reach"
            here = int(at[ready].min())
            self.active = (at == here) & ready
            while True:
                step, here, steps = code[here], here + 1, steps + 1
                assert steps < MOST_STEPS, "the kernel does not end"
                if step.opcode == "ret" and step.guard is None:
                    here = end
                elif step.opcode == "bar.sync" and step.guard is None:
                    self._wait(*step.arguments)
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

    def _wait(self, name: str, threads: str | None = None) -> None:
        """At a block's barrier of that number, for so many threads, or all of the block's; all there go on at once."""
        number, count = self._value(name), self._value(threads or str(self.program.threads))
        for value in (number, count):
            assert (value == value[:, :1])[self.active].all(), "lanes of a warp part"
        assert (number[self.active] < _BARRIERS).all(), "no such barrier"
        assert not (count[self.active] % 32).any(), "a part of a warp meets others"
        self.barrier[self.active] = number[self.active, 0]
        self.awaited[self.active] = count[self.active, 0] // 32
        for block, barrier in {*zip(self.block[self.active, 0], self.barrier[self.active], strict=True)}:
            met = np.flatnonzero((self.block[:, 0] == block) & (self.barrier == barrier))
            assert len({*self.awaited[met]}) == 1, "warps disagree on how many meet"
            assert len(met) <= self.awaited[met[0]], "more warps meet than should"
            if len(met) == self.awaited[met[0]]:
                self.shared.meet(met)
                self.barrier[met] = _NO_BARRIER

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

    def _set_words(self, names: str | list[str], words: Sequence[Lanes], on: Lanes) -> None:
        for name, word in zip([names] if isinstance(names, str) else names, words, strict=True):
            self._set(name, word, on)

    def _execute(self, step: Instruction) -> None:
        on, opcode, parts = self._lanes(step), step.opcode, step.opcode.split(".")
        base, kind = ".".join(parts[:-1]), parts[-1]
        arguments = step.arguments
        if opcode == "mov.b32" and isinstance(arguments[1], list):
            low, high = (self._value(name, 16) for name in arguments[1])
            self._set(arguments[0], low | high << np.uint64(16), on)
        elif opcode == "mov.b64" and isinstance(arguments[0], list):
            value = self._value(arguments[1])
            self._set_words(arguments[0], [value, value >> np.uint64(32)], on)
        elif opcode in OF_ONE_TYPE or (base in COMPUTED and re.fullmatch(r"[usb](16|32|64)|pred", kind)):
            self._compute(OF_ONE_TYPE.get(opcode) or COMPUTED[base], base, kind, arguments, on)
        elif opcode == "ld.param::entry.b64":
            self._set(arguments[0], np.uint64((self.arrays[arguments[1][1:-1]] + 1) << _ARRAY), on, 64)
        elif opcode == "st.global.u8":
            self._store_byte(arguments, on)
        elif vector := re.fullmatch(rf"st\.global{_WORDS}", opcode):
            self._store(int(vector[1] or 1), arguments, on)
        elif vector := re.fullmatch(_LOAD + _WORDS, opcode):
            self._set_words(arguments[0], self._load(arguments[1], int(vector[1] or 1), on), on)
        elif re.fullmatch(rf"{_LOAD}\.b64", opcode):
            low, high = self._load(arguments[1], 2, on)
            self._set(arguments[0], low | high << np.uint64(32), on, 64)
        elif re.fullmatch(r"st\.shared\.[bf]32", opcode):
            self.shared.store(self._address(arguments[0]), self._value(arguments[1], 32), on)
        elif vector := re.fullmatch(rf"ld\.shared{_WORDS}", opcode):
            loaded = self.shared.load(self._address(arguments[1]), int(vector[1] or 1), on)
            self._set_words(arguments[0], [*loaded], on)
        elif parts[1:2] == ["sync"] or opcode == "bar.warp.sync":
            assert step.guard is None, "a part of a warp does what is for all of it"
            self._together(opcode, arguments, on)
        elif opcode != "fence.mbarrier_init.release.cluster":  # of barriers that no kernel here has
            raise NotImplementedError(f"{opcode} {arguments}")

    def _compute(self, function: Callable[..., Any], base: str, kind: str, arguments: list[Any], on: Lanes) -> None:
        bits = {"pred": 64, "u16x2": 32}.get(kind) or int(kind[1:])
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

    def _load(self, place: str, width: int, on: Lanes) -> list[Lanes]:
        """So many neighbouring words of an input."""
        first = self._place(False, place, 4 * width, on) // 4
        loaded = np.zeros((width, *self.shape), np.uint64)
        for i in range(width):
            loaded[i][on] = self.memory[first + i]
        return [*loaded]

    def _store(self, width: int, arguments: list[Any], on: Lanes) -> None:
        """So many neighbouring words of an output."""
        place, names = arguments
        first = self._place(True, place, 4 * width, on) // 4
        for i, name in enumerate(names if width > 1 else [names]):
            word = first + i
            self.memory[word] = self._value(name, 32)[on]
            np.add.at(self.stores, word, 1)
            assert (self.stores[word] == 1).all(), "a word is stored twice"

    def _store_byte(self, arguments: list[Any], on: Lanes) -> None:
        byte = self._place(True, arguments[0], 1, on)
        self.memory.view(np.uint8)[byte] = self._value(arguments[1], 8)[on]
        np.add.at(self.stores.reshape(-1), byte, 1)
        assert (self.stores.reshape(-1)[byte] == 1).all(), "a byte is stored twice"

    def _place(self, stores: bool, name: str, size: int, on: Lanes) -> NDArray[Any]:
        """The byte of the whole memory at which each access of so many bytes begins."""
        address = self._address(name)[on]
        array, offset = (address >> _ARRAY) - 1, address & ((1 << _ARRAY) - 1)
        assert ((array >= 0) & (array < len(self.lengths))).all(), "not within an array"
        assert ((array >= self.num_inputs) == stores).all(), "a load of an output, or a store to an input"
        assert not (offset % size).any(), "misaligned"
        assert (offset + size <= 4 * self.lengths[array]).all(), "beyond the end of an array"
        return 4 * self.starts[array] + offset

    def _together(self, opcode: str, arguments: list[Any], on: Lanes) -> None:
        """What all lanes of a warp do at once."""
        if opcode == "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16":
            values = [self._value(name, 32) for name in arguments[1]]
            self.shared.store_turned(self._address(arguments[0]), values, self.active)
            return
        name = arguments[0]
        value: Any = self._value(arguments[1], 32) if len(arguments) > 2 else None
        if arguments[-1] not in ("-1", "0xffffffff"):
            raise NotImplementedError(f"{opcode} of a part of a warp, {arguments}")
        if opcode == "bar.warp.sync":
            for warp in np.flatnonzero(self.active):
                self.shared.meet(np.array([warp]))
        elif opcode == "elect.sync":  # which lane is chosen is not said: here it is the first
            self._set(name[0], 0, on)
            self._set(name[1], np.arange(32) == 0, on)
        elif agreed := re.fullmatch(r"redux\.sync\.(add|max|min)\.u32", opcode):
            self._set(name, AGREED[agreed[1]](value, axis=1, keepdims=True), on)
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
