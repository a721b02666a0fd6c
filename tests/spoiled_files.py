"""Files spoiled at random by hypothesis: JSON edited, bytes damaged; and a limit on how long reading them may take."""

import contextlib
import copy
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from annotations import unchecked_annotations
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SECONDS = 10  # Anything that takes longer on a folder of 100 kB hangs.
HUGE = 2**63
WORDS: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, 0, -1, 3, 2**31, HUGE, 10**40, 1e308, 0.5, "", "../x", "/etc/passwd", "é" * 9, []]
)
JUNK = WORDS | st.recursive(
    WORDS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner), max_leaves=4
)
EDIT = st.tuples(st.sampled_from(["replace", "delete", "rename", "copy"]), st.integers(0, 2**32), JUNK)
BYTES = st.tuples(st.integers(0, 2**32), st.sampled_from(["flip", "cut", "insert"]), st.binary(min_size=1, max_size=9))


class Hang(BaseException):
    """An example took longer than `SECONDS`."""


@contextlib.contextmanager
def no_hang() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from nodes(value[key])


def edited(value: Any, edits: list[tuple[str, int, Any]]) -> Any:
    value = copy.deepcopy(value)
    for kind, at, junk in edits:
        places = list(nodes(value))
        if not places:
            break
        parent, key = places[at % len(places)]
        if kind == "delete":
            del parent[key]
        elif kind == "rename" and isinstance(parent, dict):
            parent[str(junk)] = parent.pop(key)
        elif kind == "copy":
            other, there = places[(at // 7) % len(places)]
            parent[key] = copy.deepcopy(other[there])
        else:
            parent[key] = junk
    return value


def damaged(content: bytes, damages: list[tuple[int, str, bytes]]) -> bytes:
    for at, kind, by in damages:
        at %= len(content) + 1
        if kind == "cut":
            content = content[:at]
        elif kind == "insert":
            content = content[:at] + by + content[at:]
        else:
            content = content[:at] + by + content[at + len(by) :]
    return content


def spoiled(content: bytes, edits: list[Any], damages: list[Any]) -> bytes:
    """A JSON file or a safetensors file with its JSON edited and its bytes damaged; of any other file, its bytes."""
    if content.startswith(b"{"):
        return damaged(json.dumps(edited(json.loads(content), edits)).encode(), damages)
    if content[8:9] != b"{":
        return damaged(content, damages)
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(edited(json.loads(content[8:end]), edits)).encode()
    return damaged(len(header).to_bytes(8, "little") + header + content[end:], damages)


def in_words(look: Callable[[], object]) -> bool:
    """Whether `look` gives an answer; False for an error in words. Anything else, and a hang, propagates."""
    said = None
    try:
        with no_hang(), unchecked_annotations():
            look()
    except (ValueError, NotImplementedError, FileNotFoundError) as error:
        said = str(error)
    assert said is None or 0 < len(said) < 5000
    return said is None


def fuzz(files: Sequence[Path], survives: Callable[[], None], examples: int) -> None:
    """Calls `survives` while one of `files` is spoiled, `examples` times; the first of them are spoiled first."""
    contents = {path: path.read_bytes() for path in files}

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), database=None)
    @given(st.sampled_from(files), st.lists(EDIT, max_size=3), st.lists(BYTES, max_size=2))
    def one(path: Path, edits: list[Any], damages: list[Any]) -> None:
        path.write_bytes(spoiled(contents[path], edits, damages))
        try:
            survives()
        finally:
            path.write_bytes(contents[path])

    one()
