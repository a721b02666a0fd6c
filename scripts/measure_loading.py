"""Measures how fast one EP8 rank's part of a layer is loaded, beside `dd` over the same bytes, cold and warm.

uv run scripts/measure_loading.py                     # makes 112 experts at the release's widths, 2.3 GB, for a while
uv run scripts/measure_loading.py --folder DIR --devices gpu --json loading.json

Cold: the files' pages are dropped with posix_fadvise before each run. `dd` and loading alternate, so that both meet the
same disk; and before each, as much memory as loading takes is written to and freed: a virtual machine whose host takes
free memory back finds new pages more slowly than its disk reads, and dd needs hardly any.

The peak of the host's memory is the process's own, less what it held before and less the layer on a CPU.
"""

import functools
import gc
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

EXPERTS = 112  # of 896, one rank of eight


def measure(
    folder: Annotated[Path | None, typer.Option(help="A checkpoint of one MoE layer. Default: one is made.")] = None,
    devices: Annotated[Literal["cpu", "gpu"], typer.Option(help="Where the layer is to go.")] = "cpu",
    repeats: Annotated[int, typer.Option(min=1, help="Cold runs of each.")] = 3,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the results as JSON.")] = None,
) -> None:
    """Measure loading beside dd."""
    os.environ["JAX_PLATFORMS"] = "cpu" if devices == "cpu" else "cuda,cpu"
    with _checkpoint(folder) as source:
        results = _measure(source, repeats)
    if json is not None:
        from k3jax import outputs

        outputs.write_json(json, results)


def _measure(source: Path, repeats: int) -> dict[str, Any]:
    import jax

    from k3jax import LoadOptions, load_layer
    from k3jax.compare.run import environment

    files = sorted(source.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    results: dict[str, Any] = {"environment": environment(), "bytes": total, "rates": {}}
    print(f"{total / 1e9:.3f} GB in {source}, to {jax.devices()[0].device_kind}")

    def record(name: str, seconds: list[float]) -> float:
        rate = total / statistics.median(seconds) / 1e9
        results["rates"][name] = {"GB_per_s": rate, "seconds": seconds}
        print(f"{name:42} {rate:6.2f} GB/s   of {', '.join(f'{total / s / 1e9:.2f}' for s in seconds)}")
        return rate

    def load(recipe: str = "w4a16", implementation: str | None = None) -> Any:
        layer = load_layer(source, 0, recipe=recipe, implementation=implementation, options=LoadOptions())
        return jax.block_until_ready(layer)

    def dd() -> None:
        for file in files:
            subprocess.run(["dd", f"if={file}", "of=/dev/null", "bs=8M"], check=True, capture_output=True)

    load("w4a16", "xla")  # compiles
    gc.collect()
    before = _resident()
    cold: dict[str, list[float]] = {"dd": [], "load": []}
    for _ in range(repeats):
        for name, action in (("dd", dd), ("load", lambda: load("w4a16", "xla"))):
            _drop_pages(files)
            _touch_memory(2 * total)
            cold[name].append(_seconds(action))
    ratio = record("load, cold, checkpoint's layout", cold["load"]) / record("dd, cold", cold["dd"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    held = total if jax.devices()[0].platform == "cpu" else 0
    results |= {"of_dd": ratio, "peak_extra_bytes": peak - held}
    print(f"of dd: {ratio:.2f}; the host's memory at its peak beside the layer: {(peak - held) / 2**20:,.0f} MiB")
    dd()
    record("dd, warm", [_seconds(dd) for _ in range(repeats)])
    kinds: list[tuple[str, str | None]] = [("w4a16", "xla"), ("bf16", "xla")]
    if jax.devices()[0].platform != "cpu":
        kinds.append(("w4a16", None))  # this device's kernel's layout
    for recipe, implementation in kinds:
        load(recipe, implementation)
        seconds = [_seconds(functools.partial(load, recipe, implementation)) for _ in range(repeats)]
        record(f"load, warm, {recipe}, {implementation or 'the fastest kernel'}", seconds)
    if jax.devices()[0].platform == "cpu":
        record("to mosaic's layout on this CPU, from memory", [_seconds(_lay_out(load))])
    return results


def _lay_out(load: Callable[..., Any]) -> Callable[[], Any]:
    """Re-lays a loaded layer out, as `k3jax convert --implementation mosaic` does."""
    import jax

    from k3jax.experts import gate_and_up_rows
    from pallas_kernels import to_kernel_layout

    layer = load("w4a16", "xla")
    w13: Any = gate_and_up_rows(layer.w13.get_value())
    w2 = layer.w2.get_value()
    return lambda: jax.block_until_ready(
        [to_kernel_layout(w, recipe="w4a16", gated=gated) for w, gated in ((w13, True), (w2, False))]
    )


def _seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - start
    del result
    gc.collect()  # modules refer to themselves
    return seconds


def _drop_pages(files: list[Path]) -> None:
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _touch_memory(size: int) -> None:
    """In a process of its own, so that it does not count towards this one's peak."""
    subprocess.run([sys.executable, "-c", f"import numpy; numpy.ones({size}, numpy.uint8)"], check=True)


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@contextmanager
def _checkpoint(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        yield folder
        return
    made = Path(tempfile.mkdtemp(prefix="k3jax-loading-"))
    try:
        script = Path(__file__).with_name("make_checkpoint.py")
        options = ["--real-widths", "--experts", str(EXPERTS), "--top-k", "16", "--no-dense", "--moe-layers", "1"]
        subprocess.run([sys.executable, script, made / "layer", *options], check=True)
        yield made / "layer"
    finally:
        shutil.rmtree(made, ignore_errors=True)


if __name__ == "__main__":
    typer.run(measure)
