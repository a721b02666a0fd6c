"""Runs layers of a checkpoint over a file of tokens: on one device, on a mesh, or on a mesh over several hosts.

uv run scripts/evaluate.py DIR tokens.npy --layers 0,1                                     # one device
uv run scripts/evaluate.py DIR tokens.safetensors --mesh expert=8 --tokens-layout sharded  # all devices of this host
srun uv run scripts/evaluate.py DIR tokens.safetensors --hosts auto --mesh expert=16 ...   # all devices of all hosts
uv run scripts/launch_hosts.py --processes 4 --devices 2 scripts/evaluate.py ...           # hosts on one machine

k3jax/evaluation/tokens.py says what a token file is. The statistics go to stdout and to `--json`, the outputs to
`--output`, a capture that `k3jax compare --against` reads and that serves as a token file itself: its outputs are then
what `relative L2` is measured against. Process 0 writes and speaks for all. On a CPU without `--hosts`, devices are
simulated as the mesh needs them. Exit status: 0 all is well, 1 an output is not finite, 2 the request is wrong.
"""

import contextlib
import functools
from pathlib import Path
from typing import Annotated, Literal

import jax
import typer
from rich.console import Console
from rich.text import Text

from k3jax import outputs
from k3jax.compare.run import parse_layers
from k3jax.config import K3Config
from k3jax.evaluation.results import as_json, capture_writer
from k3jax.evaluation.run import DEFAULT_BATCH, LayerStatistics, Layout, Plan, Request, evaluate, plan
from k3jax.options import LoadOptions
from k3jax.progress import progress_bar
from sharding.mesh import parse_mesh
from sharding.simulated import simulate_devices

Transport = Literal["all_gather", "per_rank"]


def main(
    checkpoint: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint folder.")],
    tokens: Annotated[Path, typer.Argument(metavar="FILE", help="Token file, .npy or .safetensors.")],
    layers: Annotated[str | None, typer.Option(metavar="0,1,5-7", help="Default: those the token file is for.")] = None,
    mesh: Annotated[str, typer.Option(metavar="expert=8,tensor=1", help="Over all devices. Default: none.")] = "",
    tokens_layout: Annotated[Layout, typer.Option(help="On a mesh: on every rank, or split.")] = "replicated",
    transport: Annotated[
        Transport | None, typer.Option(help="How sharded tokens travel. Default: by the number of ranks.")
    ] = None,
    recipe: Annotated[str, typer.Option(help="bf16, w4a16, w4a8 or w4a8_fp8.")] = "w4a16",
    implementation: Annotated[str | None, typer.Option(help="Default: the fastest that runs here.")] = None,
    batch: Annotated[int, typer.Option(help="Tokens at a time, over all ranks.")] = DEFAULT_BATCH,
    hosts: Annotated[str, typer.Option(metavar="one|auto|HOST:PORT,N,I", help="auto: as the cluster says.")] = "one",
    heartbeat: Annotated[int, typer.Option(min=1, help="Seconds after which a silent host is dead.")] = 100,
    output: Annotated[Path | None, typer.Option(metavar="FILE.safetensors", help="Write the outputs.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the statistics.")] = None,
) -> None:
    """Run layers over a file of tokens, on one device, a mesh, or a mesh over several hosts."""
    try:
        join(hosts, heartbeat)
        sizes = parse_mesh(mesh) if mesh else None
        if sizes is not None and hosts == "one":
            simulate_devices(sizes.devices)
        for path in filter(None, (output, json)):
            outputs.require_writable(path)
        config = K3Config.from_pretrained(checkpoint)
        request = Request(
            checkpoint=checkpoint,
            tokens=tokens,
            layers=None if layers is None else parse_layers(layers, config.num_hidden_layers),
            mesh=sizes,
            layout=tokens_layout,
            recipe=recipe,
            implementation=implementation,
            batch=batch,
            options=LoadOptions(transport=transport),
        )
        statistics = run(plan(request), output, json)
    except (ValueError, OSError, NotImplementedError) as error:
        Console(stderr=True, highlight=False).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        raise SystemExit(2) from None
    raise SystemExit(1 if any(layer.non_finite for layer in statistics) else 0)


def join(hosts: str, heartbeat: int) -> None:
    """Joins the other hosts, if any.

    Raises:
        ValueError: `hosts` is malformed, or there is no cluster to detect.
    """
    if hosts == "one":
        return
    meet = functools.partial(
        jax.distributed.initialize, heartbeat_timeout_seconds=heartbeat, shutdown_timeout_seconds=heartbeat
    )
    if hosts == "auto":
        try:
            meet()
        except ValueError as error:
            raise ValueError(f"--hosts auto: JAX detects no cluster here ({error}); give HOST:PORT,N,I") from None
        return
    parts = hosts.split(",")
    if len(parts) != 3 or ":" not in parts[0] or not all(part.isdecimal() for part in parts[1:]):
        raise ValueError(f"--hosts {hosts!r} must be one, auto or HOST:PORT,N,I: process I of N meets the others there")
    meet(parts[0], int(parts[1]), int(parts[2]))


def run(plan: Plan, output: Path | None, json: Path | None) -> list[LayerStatistics]:
    """Evaluates; process 0 writes the files and says how it goes."""
    speaks = jax.process_index() == 0
    statistics: list[LayerStatistics] = []
    with contextlib.ExitStack() as stack:
        keep = stack.enter_context(capture_writer(output, plan)) if speaks and output is not None else None
        progress = stack.enter_context(progress_bar(Console(stderr=True, quiet=not speaks)))
        for layer in evaluate(plan, progress, keep or (lambda layer, start, output: None)):
            statistics.append(layer)
            if speaks:
                print(_line(layer), flush=True)
            if speaks and json is not None:
                outputs.write_json(json, as_json(plan, statistics))
    return statistics


def _line(layer: LayerStatistics) -> str:
    said = [
        f"layer {layer.layer} ({layer.kind}): {layer.tokens:,} tokens, {layer.tokens_per_second:,.0f} tokens/s",
        f"output RMS {layer.rms:.4g}",
    ]
    if layer.non_finite:
        said.append(f"{layer.non_finite:,} NaN or infinite")
    if layer.relative_l2 is not None:
        said.append(f"relative L2 {layer.relative_l2:.2e}")
    if layer.rank_rows:
        mean = sum(layer.rank_rows) / len(layer.rank_rows)
        busiest = max(range(len(layer.rank_rows)), key=layer.rank_rows.__getitem__)
        share = layer.rank_rows[busiest] / max(mean, 1)
        said.append(f"busiest rank {busiest}: {layer.rank_rows[busiest]:,} rows, {share:.2f} x the mean")
    return ", ".join(said)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
