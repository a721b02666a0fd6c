"""How long calls take: on a GPU between their first kernel's start and their last one's end, elsewhere by the clock.

On a GPU the calls run under JAX's profiler, each after a kernel that overwrites the L2 cache. In the profile, all that
runs between two of those kernels belongs to one call. Nothing of the host is in that time but what makes the GPU wait
within a call. A call longer than `_LONG` is timed by the clock: launching and tracing it weigh nothing, or, where it is
thousands of small kernels, tracing them would slow it down.
"""

import dataclasses
import functools
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

_LONG = 0.02  # seconds
_WARM_UP = 0.05  # seconds of calls before the first that counts: clocks rise, caches of programs fill
_FLUSH_BYTES = 256 << 20  # several times the L2 of any GPU
_FLUSH_MODULE = "jit_flush_l2"
_ADVICE = "end other profilers of this process, or time by the clock with --timer wall"

Timer = Literal["device", "wall"]


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median, the fastest and the slowest."""

    us: float
    us_min: float
    us_max: float
    timer: Timer


class Activity(NamedTuple):
    """A kernel or a copy on the GPU: the XLA module that it belongs to, and nanoseconds."""

    module: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Stopwatch:
    """Times calls `repeats` times over, by the profile of a GPU where `timer` is "device".

    Raises:
        ValueError: there is no GPU to profile.
    """

    repeats: int
    timer: Timer

    def __post_init__(self) -> None:
        if self.timer == "device" and default_timer() != "device":
            raise ValueError(f"timer='device' needs a GPU, and JAX runs on {jax.default_backend()}: use --timer wall")

    def measure(self, call: Callable[[], Any], *, limit: float = math.inf) -> Timing | None:
        """Times `call`, which runs compiled programs on arrays that are on the device, and returns their results.

        None if one call takes more than `limit` seconds.

        Raises:
            OSError: the profile does not show the calls.
        """
        jax.block_until_ready(call())  # compiles what is not yet
        seconds = _seconds(call)
        if seconds > limit:
            return None
        if self.timer == "device" and seconds <= _LONG:
            (times,) = device_times([call], self.repeats, int(_WARM_UP / seconds) + 2)
            return summarise(times, "device")
        times = [_seconds(call) for _ in range(self.repeats if seconds <= _LONG else min(self.repeats, 3))]
        return summarise([1e6 * time for time in times], "wall")

    def time(self, call: Callable[[], Any]) -> Timing:
        """`measure` without a limit."""
        timing = self.measure(call)
        assert timing is not None
        return timing


def default_timer() -> Timer:
    """The device's own times on a GPU, else the clock."""
    return "device" if jax.default_backend() == "gpu" else "wall"


def summarise(microseconds: Sequence[float], timer: Timer) -> Timing:
    """The median and the extremes."""
    return Timing(statistics.median(microseconds), min(microseconds), max(microseconds), timer)


def call_times(activities: Iterable[Activity], marker: str = _FLUSH_MODULE) -> list[float]:
    """Microseconds from the first start to the last end of what follows each activity of the module `marker`.

    Raises:
        OSError: no marker is among them, or nothing follows one.
    """
    calls: list[list[Activity]] = []
    previous = ""
    for activity in sorted(activities, key=lambda activity: activity.start):
        if activity.module == marker:
            if previous != marker:
                calls.append([])
        elif calls:
            calls[-1].append(activity)
        previous = activity.module
    if not calls or not all(calls):
        raise OSError(f"the GPU's profile does not show the timed calls; {_ADVICE}")
    return [(max(one.end for one in call) - call[0].start) / 1e3 for call in calls]


def device_times(calls: Sequence[Callable[[], Any]], repeats: int, warm_up: int) -> list[list[float]]:
    """Microseconds on the GPU of each call, `repeats` times over, all of them in turn and each after a cold L2.

    The first `warm_up` rounds don't count.

    Raises:
        OSError: the profile does not show the calls.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 0
    value = jnp.float32(1)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for call in [*calls] * (warm_up + repeats):
                _flush_l2()(value)
                result = call()
            jax.block_until_ready(result)
        times = call_times(_activities(folder))
    expected = len(calls) * (warm_up + repeats)
    if len(times) != expected:
        raise OSError(f"the GPU's profile shows {len(times)} calls of {expected}; {_ADVICE}")
    return [times[first :: len(calls)][warm_up:] for first in range(len(calls))]


def _activities(folder: str) -> list[Activity]:
    """What the first GPU did, out of the profile in `folder`."""
    (file,) = Path(folder).rglob("*.xplane.pb")
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the profiler's own types
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            if plane.name != "/device:GPU:0":
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    found += [
                        Activity(str(dict(event.stats).get("hlo_module", "")), event.start_ns, event.end_ns)
                        for event in line.events
                    ]
    return found


@functools.cache
def _flush_l2() -> Callable[[jax.Array], jax.Array]:
    def flush_l2(value: jax.Array) -> jax.Array:
        return jnp.full(_FLUSH_BYTES // 4, value)

    return jax.jit(flush_l2)


def _seconds(call: Callable[[], Any]) -> float:
    """Of one call by the clock, from an idle device to its results."""
    if jax.default_backend() == "gpu":
        jax.block_until_ready(_flush_l2()(jnp.float32(1)))
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


CEILINGS = ("read", "copy", "bf16", "fp8")


def measure_ceiling(name: str, stopwatch: Stopwatch) -> float:
    """What this device reaches through XLA: bytes or operations a second.

    read: the maximum over 4 GiB. copy: `a + 1` over 4 GiB, bytes read and written. bf16, fp8: a product of two square
    matrices of 8192, with float32 sums and a bfloat16 result. On a CPU all are smaller.
    """
    on_gpu = jax.default_backend() == "gpu"
    if name in ("read", "copy"):
        length = (1 << 30) if on_gpu else (1 << 20)
        values = jax.jit(
            lambda: jax.lax.map(lambda key: jax.random.normal(key, (length // 16,)), _keys(16)).reshape(-1)
        )()
        call = jax.jit(jnp.max) if name == "read" else jax.jit(lambda a: a + 1)
        amount = 4.0 * length * (1 if name == "read" else 2)
        operands: tuple[jax.Array, ...] = (values,)
    else:
        size = 8192 if on_gpu else 256
        dtype = jnp.bfloat16 if name == "bf16" else jnp.float8_e4m3fn
        operands = tuple(jax.random.normal(key, (size, size)).astype(dtype) for key in _keys(2))
        call = jax.jit(functools.partial(_rows_by_rows, jnp.bfloat16))
        amount = 2.0 * size**3
    return amount / stopwatch.time(lambda: call(*operands)).us * 1e6


def _rows_by_rows(dtype: jax.typing.DTypeLike, a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def _keys(count: int) -> jax.Array:
    return jax.random.split(jax.random.key(0), count)
