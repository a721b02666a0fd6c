"""The text of one PTX kernel as a list of instructions, which `ptx_interpreter` runs."""

import re
from typing import Any, NamedTuple


class Instruction(NamedTuple):
    """`@!guard opcode arguments`; a vector is a list of names. Names local to a pair of braces carry its number."""

    guard: str | None
    unless: bool
    opcode: str
    arguments: list[Any]


class Program(NamedTuple):
    """The instructions of a kernel's entry, where its labels point, its parameters' names and its threads a block."""

    code: list[Instruction]
    labels: dict[str, int]
    parameters: list[str]
    threads: int


def parsed(ptx: str) -> Program:
    """Of a text with one entry and no function besides, braces within which are at most one deep."""
    (entry,) = re.finditer(r"\.entry", ptx)
    start = ptx.index("{", entry.start())
    (threads,) = re.findall(r"\.maxntid (\d+), 1, 1\b", ptx)
    body = re.sub(r"//.*|^\s*\.(loc|file|section)\b.*", "", ptx[start + 1 : ptx.index("$L__func_end0:")], flags=re.M)
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    scope, outer = 0, True  # braces seen so far, and whether we stand outside of them
    for statement in body.split(";"):
        while True:
            statement = statement.strip()
            if label := re.match(r"(\$\w+):", statement):
                labels[label[1]] = len(code)
                statement = statement[label.end() :]
            elif statement[:1] in ("{", "}"):
                assert outer == (statement[0] == "{"), "braces within braces"
                scope, outer = scope + outer, not outer
                statement = statement[1:]
            else:
                break
        if statement and not statement.startswith((".reg", ".shared", ".pragma")):
            code.append(_instruction(statement, None if outer else scope))
    return Program(code, labels, re.findall(r"\.param \.u64 [^,\n]*?(\w+_param_\d+)", ptx[:start]), int(threads))


def _instruction(statement: str, scope: int | None) -> Instruction:
    parts = re.fullmatch(r"(?:@(!?)(\S+)\s+)?(\S+)\s*(.*)", statement, re.S)
    assert parts is not None, statement

    def scoped(name: str) -> str:
        return name if scope is None else re.sub(r"^(?=[a-z])", f"{scope}:", name.strip())

    arguments: list[Any] = []
    for text in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", parts[4]):
        names = text[1:-1].split(",") if text[0] == "{" else re.split(r"\|", text)
        arguments.append([scoped(name.strip()) for name in names] if len(names) > 1 else scoped(text))
    return Instruction(parts[2] and scoped(parts[2]), parts[1] == "!", parts[3], arguments)
