"""What of a program's collectives lies under its compute, by the trace (`*.trace.json.gz`) that JAX's profiler writes.

A collective's time on a device is that of its kernel, in which it also waits for the other ranks.
"""

import dataclasses
import gzip
import itertools
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Span = tuple[float, float]
"""From when to when, in microseconds."""

_COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|ragged-all-to-all|all-to-all|collective-permute|psum|pmax|ppermute)\b.*"
)


@dataclasses.dataclass(frozen=True)
class Activity:
    """A kernel or a copy on `device`; `collective` is its name in the program, None for compute."""

    device: str
    collective: str | None
    span: Span


@dataclasses.dataclass(frozen=True)
class Overlap:
    """One collective: how often it ran, over all devices, its microseconds in all, and how many lay under compute."""

    collective: str
    count: int
    us: float
    hidden_us: float

    @property
    def exposed_us(self) -> float:
        return self.us - self.hidden_us


def union(spans: Iterable[Span]) -> list[Span]:
    """The same moments as disjoint spans, in order; empty ones vanish."""
    found: list[Span] = []
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def covered(spans: Iterable[Span], by: Iterable[Span]) -> tuple[float, float]:
    """How long `spans` are together, each moment counted once, and how much of that lies within one of `by`."""
    mine, cover = union(spans), union(by)
    total, hidden, first = math.fsum(end - start for start, end in mine), 0.0, 0
    for start, end in mine:
        while first < len(cover) and cover[first][1] <= start:
            first += 1
        for low, high in itertools.islice(cover, first, None):
            if low >= end:
                break
            hidden += min(end, high) - max(start, low)
    return total, hidden


def overlaps(activities: Iterable[Activity]) -> list[Overlap]:
    """Every collective, in the order in which they first ran; a device's are held against its own compute."""
    found: dict[str, Overlap] = {}
    ordered = sorted(activities, key=lambda activity: activity.span)
    names = dict.fromkeys(activity.collective for activity in ordered if activity.collective is not None)
    for device in dict.fromkeys(activity.device for activity in ordered):
        own = [activity for activity in ordered if activity.device == device]
        compute = union(activity.span for activity in own if activity.collective is None)
        for name in names:
            spans = [activity.span for activity in own if activity.collective == name]
            us, hidden = covered(spans, compute)
            before = found.get(name, Overlap(name, 0, 0.0, 0.0))
            found[name] = Overlap(name, before.count + len(spans), before.us + us, before.hidden_us + hidden)
    return [found[name] for name in names]


def read_trace(path: Path) -> list[Activity]:
    """What devices did: the streams of GPUs, or the instructions that a CPU ran for its simulated devices.

    Raises:
        ValueError: the file is no such trace, or it shows no device at work.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no trace of JAX's profiler: {error}") from None
    processes: dict[Any, str] = {}
    threads: dict[Any, str] = {}
    for event in events:
        if event.get("name") == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        elif event.get("name") == "thread_name":
            threads[event["pid"], event["tid"]] = event["args"]["name"]
    activities = []
    for event in events:
        process = processes.get(event.get("pid"), "")
        thread = threads.get((event.get("pid"), event.get("tid")), "")
        device = _device(process, thread, event.get("args", {})) if event.get("ph") == "X" else None
        if device is not None:
            span = (float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0)))
            activities.append(Activity(device, collective_name(event["name"], event.get("args", {})), span))
    if not activities:
        raise ValueError(f"{path} shows no device at work; it has {', '.join(processes.values()) or 'nothing'}")
    return activities


def collective_name(event: str, arguments: dict[str, Any]) -> str | None:
    """The collective that an event belongs to, by its instruction or else by its kernel; None for compute."""
    instruction = str(arguments.get("hlo_op", event)).replace("_", "-")
    if _COLLECTIVE.fullmatch(instruction):
        return instruction.replace("-start", "").replace("-done", "")
    return event.split("(")[0] if "nccl" in event.lower() else None


def _device(process: str, thread: str, arguments: dict[str, Any]) -> str | None:
    if process.startswith("/device:GPU"):
        return process if thread.startswith("Stream") else None
    if "hlo_op" in arguments and "device_ordinal" in arguments:
        return f"simulated device {arguments['device_ordinal']}"
    return None
