"""Reads a compiled program's text: its collectives in the order they are scheduled, and what depends on what."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_BYTES = {"pred": 1, "u8": 1, "s8": 1, "f8e4m3fn": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Array:
    """`f32[1024,3584]`."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line: `%name = outputs op(operands)`. `parameter` is a parameter's path in the caller's arguments."""

    name: str
    op: str
    outputs: tuple[Array, ...]
    operands: tuple[str, ...]
    parameter: str = ""


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective: what it takes and gives on each rank, and what is computed while it runs.

    Attributes:
        meanwhile: instructions scheduled between its start and its end; empty where it blocks.
    """

    op: str
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    start: str
    meanwhile: tuple[str, ...] = ()


class Program:
    """The text of a compiled, scheduled module.

    Attributes:
        instructions: name -> instruction, of every computation, in the order of the text. entry: names, as scheduled.
        custom_calls: the targets of custom calls, how often each is there.
    """

    def __init__(self, text: str) -> None:
        self.custom_calls = Counter(re.findall(r'custom_call_target="([^"]+)"', text))
        self.instructions: dict[str, Instruction] = {}
        self.entry: list[str] = []
        in_entry = False
        for line in text.splitlines():
            in_entry = (in_entry or line.startswith("ENTRY")) and line != "}"
            found = _instruction(line)
            if found is not None:
                self.instructions[found.name] = found
                self.entry += [found.name] if in_entry else []
        assert "is_scheduled=true" in text
        assert self.entry

    def collectives(self) -> list[Collective]:
        """All of them, wherever they are."""
        return list(self._collectives())

    def _collectives(self) -> Iterator[Collective]:
        names = list(self.instructions)
        for at, instruction in enumerate(self.instructions.values()):
            op = instruction.op.removesuffix("-start")
            if op not in COLLECTIVES:
                continue
            inputs = tuple(array for name in instruction.operands for array in self.instructions[name].outputs)
            if op == "ragged-all-to-all":
                inputs = inputs[:1]  # then come the buffer it fills, offsets and sizes
            if op == instruction.op:
                yield Collective(op, inputs, instruction.outputs, instruction.name)
                continue
            done = next(name for name in names if instruction.name in self.instructions[name].operands)
            meanwhile = tuple(names[at + 1 : names.index(done)])
            yield Collective(op, inputs, self.instructions[done].outputs, instruction.name, meanwhile)

    def parameter(self, path: str) -> str:
        """The name of the entry's parameter whose path in the caller's arguments ends in `path`."""
        (name,) = (n for n in self.entry if self.instructions[n].parameter.endswith(path))
        return name

    def readers(self, name: str) -> list[str]:
        """Instructions of the entry that compute with `name`, itself or under another shape."""
        found = []
        for reader in self.entry:
            if name in self.instructions[reader].operands:
                views = ("bitcast", "copy", "reshape", "get-tuple-element")
                found += self.readers(reader) if self.instructions[reader].op in views else [reader]
        return found

    def needs(self, name: str) -> set[str]:
        """All that must be there before `name`."""
        found: set[str] = set()
        left = [name]
        while left:
            new = set(self.instructions[left.pop()].operands) - found
            found |= new
            left += new
        return found


def _instruction(line: str) -> Instruction | None:
    head = re.match(r"\s*(?:ROOT )?%(\S+) = ", line)
    if head is None:
        return None
    rest = line[head.end() :]
    kind_ends = _closing(rest) if rest.startswith("(") else rest.index(" ")
    call = re.match(r"\s*([a-z][\w-]*)\(", rest[kind_ends:])
    if call is None:
        return None
    arguments = rest[kind_ends + call.end() - 1 :]
    outputs = tuple(
        Array(dtype, tuple(int(size) for size in shape.split(",") if size))
        for dtype, shape in _ARRAY.findall(rest[:kind_ends])
    )
    operands = tuple(re.findall(r"%([^\s,()]+)", arguments[: _closing(arguments)]))
    label = re.search(r'op_name="([^"]*)"', line) if call[1] == "parameter" else None
    return Instruction(head[1], call[1], outputs, operands, label[1] if label else "")


def _closing(text: str) -> int:
    """Where the parenthesis that `text` begins with is closed, exclusive."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return at + 1
    raise ValueError(f"unbalanced: {text[:80]}")
