"""How long calls take on the current CUDA stream, each after a write over the L2 cache."""

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

FLUSH_BYTES = 256 << 20
WARM_UP_MS, TIMED_MS, PROFILED_CALLS = 50, 200, 20


class Kernel(NamedTuple):
    """Something that the GPU did, in microseconds."""

    name: str
    start: float
    end: float


class Timer:
    """Times calls, each after a write of `FLUSH_BYTES`."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.cache = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def events(self, call: Callable[[], Any]) -> list[float]:
        """Microseconds of each call, by events: calls for about `TIMED_MS`, after about `WARM_UP_MS` more."""
        estimate = statistics.median(self._events(call, 5))
        self._events(call, max(1, int(WARM_UP_MS / estimate)))
        return [1e3 * ms for ms in self._events(call, max(10, int(TIMED_MS / estimate)))]

    def profile(self, call: Callable[[], Any]) -> list[list[Kernel]]:
        """The kernels of `PROFILED_CALLS` calls, in the order of their starts; none if they can't be told apart."""
        profiler = self.torch.profiler
        self._events(call, PROFILED_CALLS)
        with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(PROFILED_CALLS):
                self.cache.zero_()
                call()
            self.torch.cuda.synchronize()
        cuda = self.torch.autograd.DeviceType.CUDA
        kernels = [
            Kernel(event.name, event.time_range.start, event.time_range.end)
            for event in profile.events()
            if event.device_type == cuda
        ]
        kernels.sort(key=lambda kernel: kernel.start)
        each, left = divmod(len(kernels), PROFILED_CALLS)
        if left or each < 2:
            return []
        return [kernels[index + 1 : index + each] for index in range(0, len(kernels), each)]  # without the write

    def _events(self, call: Callable[[], Any], count: int) -> list[float]:
        event = self.torch.cuda.Event
        pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(count)]
        for start, stop in pairs:
            self.cache.zero_()
            start.record()
            call()
            stop.record()
        self.torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in pairs]


def span(calls: list[list[Kernel]]) -> float | None:
    """The median of microseconds from a call's first kernel to its last one's end."""
    if not calls:
        return None
    return statistics.median(max(kernel.end for kernel in call) - call[0].start for call in calls)


def kernel_times(calls: list[list[Kernel]]) -> list[tuple[str, float]]:
    """The name of each kernel of a call, in their order, and the median of its microseconds."""
    return [
        (same[0].name, statistics.median(kernel.end - kernel.start for kernel in same))
        for same in zip(*calls, strict=True)
    ]
