"""How much of each collective of an MoE layer over ranks of `expert` lies under compute, and how much is exposed.

uv run --extra cuda13 scripts/overlap.py --mesh expert=2 --transport per_rank
XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true uv run --extra cuda13 scripts/overlap.py --mesh expert=2 ...
uv run scripts/overlap.py --trace FILE.trace.json.gz      # of a profile that is there already

It runs the layer under JAX's profiler, with random weights at Kimi K3's sizes and tokens that pick evenly, and reads
the trace. What is printed is the mean of a collective's runs, on all devices. Exit status: 2 if the request is wrong.
"""

import dataclasses
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import typer
from rich.console import Console
from rich.text import Text

from k3jax import outputs
from k3jax.bench import ep_calls, layer_calls
from k3jax.bench.calls import Program
from k3jax.bench.layer_cases import LayerCase
from k3jax.bench.overlap import Overlap, overlaps, read_trace
from k3jax.moe import MoE
from k3jax.options import LoadOptions
from sharding import make_mesh, parse_mesh
from sharding.simulated import simulate_devices

WARM_UP = 3


def main(
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Only read this trace of JAX's profiler.")] = None,
    mesh: Annotated[str, typer.Option(metavar="expert=2", help="Ranks; a CPU simulates its devices.")] = "expert=2",
    transport: Annotated[Literal["all_gather", "per_rank"], typer.Option()] = "all_gather",
    split_shared: Annotated[bool, typer.Option("--split-shared", help="Split the shared experts too.")] = False,
    tokens: Annotated[int, typer.Option(min=1, help="On each rank.")] = 1024,
    recipe: Annotated[str, typer.Option(help="bf16, w4a16, w4a8 or w4a8_fp8.")] = "w4a16",
    implementation: Annotated[str | None, typer.Option(help="Default: the fastest that runs here.")] = None,
    groups: Annotated[int, typer.Option(min=1, help="Experts on each rank.")] = 112,
    picks: Annotated[int, typer.Option(min=1, help="Experts that a token goes to.")] = 16,
    model: Annotated[int, typer.Option(min=32, help="Length of a token.")] = 7168,
    hidden: Annotated[int, typer.Option(min=32, help="Length of an expert's input and output row.")] = 3584,
    width: Annotated[int, typer.Option(min=32, help="Width of an expert.")] = 3072,
    shared: Annotated[int, typer.Option(min=0, help="Shared experts.")] = 2,
    calls: Annotated[int, typer.Option(min=1, help="Calls in the profile.")] = 10,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures.")] = None,
) -> None:
    """Show what of an MoE layer's collectives lies under compute, out of a profile."""
    try:
        if json is not None:
            outputs.require_writable(json)
        if trace is not None:
            found = overlaps(read_trace(trace))
        else:
            ranks = parse_mesh(mesh).expert
            sizes = {"picks": picks, "model": model, "hidden": hidden, "width": width, "shared": shared}
            case = LayerCase(recipe, ranks * tokens, groups=ranks * groups, **sizes)
            options = LoadOptions(transport=transport, split_shared=split_shared)
            found = profile(layer_over(mesh, case, implementation, options), calls)
        print_overlaps(found)
        if json is not None:
            outputs.write_json(json, [dataclasses.asdict(one) | {"exposed_us": one.exposed_us} for one in found])
    except (ValueError, OSError, NotImplementedError) as error:
        Console(stderr=True, highlight=False).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        raise SystemExit(2) from None


def layer_over(mesh: str, case: LayerCase, implementation: str | None, options: LoadOptions) -> Program:
    """The case's layer over `mesh`, with sharded tokens.

    Raises:
        ValueError: there are not that many devices, or they cannot split the layer.
        NotImplementedError: the named implementation cannot run it.
    """
    sizes = parse_mesh(mesh)
    simulate_devices(sizes.devices)
    over = make_mesh(**dataclasses.asdict(sizes))
    config, arrays = layer_calls.make_weights(case)
    how: dict[str, Any] = {"recipe": case.recipe, "implementation": implementation, "options": options}
    layer = MoE(config, arrays=arrays, mesh=over, tokens="sharded", **how)
    x = ep_calls.over_ranks(layer_calls.make_tokens(case, layer), over)
    return layer_calls.layer_program(layer, x)


def profile(program: Callable[[], Any], calls: int) -> list[Overlap]:
    """The collectives of so many calls, after a few that do not count.

    Raises:
        ValueError: the profile shows no device.
    """
    for _ in range(WARM_UP):
        jax.block_until_ready(program())
    quiet = jax.profiler.ProfileOptions()
    quiet.python_tracer_level = 0
    if jax.default_backend() == "gpu":
        quiet.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=quiet):
            for _ in range(calls):
                result = program()
            jax.block_until_ready(result)
        (file,) = Path(folder).rglob("*.trace.json.gz")
        return overlaps(read_trace(file))


def print_overlaps(found: list[Overlap]) -> None:
    """A line a collective, and one of them all."""
    print(f"{'collective':40} {'runs':>6} {'us a run':>10} {'hidden':>8} {'exposed us':>11}")
    us, hidden_us = (math.fsum(getattr(one, name) for one in found) for name in ("us", "hidden_us"))
    whole = Overlap("all", sum(one.count for one in found), us, hidden_us)
    for one in [*found, whole]:
        runs = max(one.count, 1)
        hidden = f"{100 * one.hidden_us / one.us:.1f} %" if one.us else "-"
        print(f"{one.collective:40} {one.count:>6} {one.us / runs:>10.1f} {hidden:>8} {one.exposed_us / runs:>11.1f}")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
