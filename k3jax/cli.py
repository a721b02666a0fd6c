"""The command `k3jax`. Exit status: 0 all is well, 1 a comparison failed, 2 the request or its input is wrong."""

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from k3jax.bench.run import Request

# Commands import what they need when they run: `k3jax --help` must not wait seconds for JAX.

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Kimi K3's MLP and mixture-of-experts layers in JAX.",
)

JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the results as JSON.")]


def main() -> None:
    """The console entry point."""
    app()


@app.command()
def compare(
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Checkpoint folder. Default: a small embedded one.")
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(metavar="0,1,5-7", help="Layers, from 0. Default: the first dense and the first MoE layer."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="How many tokens.", show_default="128, or all of a capture")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the tokens, which are unit-normal bfloat16.")] = 0,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="R,...",
            help="Of bf16, w4a16, w4a8 and w4a8_fp8. Default: bf16,w4a16,w4a8; bf16 alone where experts are plain.",
        ),
    ] = None,
    implementation: Annotated[
        str | None, typer.Option(help="Of the GEMMs: reference, xla, ... Default: the fastest that runs here.")
    ] = None,
    against: Annotated[
        str,
        typer.Option(metavar="oracle|exact|FILE", help="The truth: float64 with or without rounding, or a capture."),
    ] = "oracle",
    dense_weights: Annotated[
        str, typer.Option(metavar="bf16|fp8", help="Shared experts, latent projections, dense layers: bf16, or e4m3.")
    ] = "bf16",
    quantize_plain: Annotated[
        bool, typer.Option("--quantize-plain", help="Quantise experts that are stored plain for the w4 recipes.")
    ] = False,
    mesh: Annotated[
        str, typer.Option(metavar="expert=4,tensor=2", help="Run over a mesh; a CPU simulates its devices.")
    ] = "",
    tokens_layout: Annotated[
        Literal["replicated", "sharded"], typer.Option(help="On a mesh: all tokens on every rank, or split.")
    ] = "replicated",
    transport: Annotated[
        Literal["all_gather", "per_rank"] | None,
        typer.Option(help="How sharded tokens travel. Default: by the number of ranks."),
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="Print every number, not only where stages fail.")] = False,
    json: JsonOption = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a report with plots, one file that works offline.")
    ] = None,
) -> None:
    """Compare layers with independent truth, stage by stage, and name the first stage that diverges."""
    with _errors_in_words():
        from k3jax import outputs
        from k3jax.checkpoint.synthetic import default_checkpoint
        from k3jax.compare import console, run
        from k3jax.compare.report import html_report
        from k3jax.compiling import keep_compiled_programs
        from k3jax.progress import progress_bar
        from sharding.mesh import parse_mesh
        from sharding.simulated import simulate_devices

        sizes = parse_mesh(mesh) if mesh else None
        if sizes is not None:
            simulate_devices(sizes.devices)
        keep_compiled_programs()
        for path in filter(None, (json, report)):
            outputs.require_writable(path)
        request = run.Request(
            checkpoint=checkpoint or default_checkpoint(),
            layers=layers,
            recipes=None if recipe is None else tuple(part.strip() for part in recipe.split(",")),
            tokens=tokens,
            seed=seed,
            implementation=implementation,
            against=against,
            quantize_plain=quantize_plain,
            dense_weights=dense_weights,
            mesh=sizes,
            layout=tokens_layout,
            transport=transport,
        )
        with progress_bar(Console(stderr=True)) as progress:
            result = run.run(run.plan(request), progress)
        console.print_run(Console(highlight=False), result, details=details)
        if json is not None:
            outputs.write_json(json, run.as_json(result))
        if report is not None:
            outputs.write_text(report, html_report(result, command=shlex.join(["k3jax", *sys.argv[1:]])))
    if not result.ok:
        raise typer.Exit(1)


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint folder.")],
    mesh: Annotated[
        str, typer.Option(metavar="expert=8,tensor=1", help="Mesh to divide the weights over; data is an axis too.")
    ] = "",
    json: JsonOption = None,
) -> None:
    """Show a checkpoint's config, layers and tensors, what is missing or extra, and the memory its weights need."""
    with _errors_in_words():
        from k3jax import outputs
        from k3jax.inspection import console, summary
        from k3jax.progress import progress_bar
        from sharding.mesh import parse_mesh

        if json is not None:
            outputs.require_writable(json)
        with progress_bar(Console(stderr=True)) as progress:
            result = summary.inspect_checkpoint(folder, parse_mesh(mesh), progress)
        console.print_inspection(Console(highlight=False), result)
        if json is not None:
            outputs.write_json(json, summary.as_json(result))
    if not result.problems.ok:
        raise typer.Exit(1)


@app.command()
def convert(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder, or one that was converted to before.")],
    layers: Annotated[str | None, typer.Option(metavar="0,1,5-7", help="Layers, from 0. Default: all.")] = None,
    mesh: Annotated[
        str, typer.Option(metavar="expert=8,tensor=1", help="Mesh to hold a layer on meanwhile. Default: one device.")
    ] = "",
    recipe: Annotated[str, typer.Option(help="bf16, w4a16, w4a8 or w4a8_fp8.")] = "w4a16",
    implementation: Annotated[
        str | None, typer.Option(help="Whose layout: mosaic, or xla for the checkpoint's. Default: as on this device.")
    ] = None,
    dense_weights: Annotated[
        str, typer.Option(metavar="bf16|fp8", help="Shared experts, latent projections, dense layers: bf16, or e4m3.")
    ] = "bf16",
    quantize_plain: Annotated[
        bool, typer.Option("--quantize-plain", help="Quantise experts that are not stored in MXFP4 for the w4 recipes.")
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Then read everything back that OUT holds.")] = False,
) -> None:
    """Write layers in the layout that a device wants, once. Goes on where it was stopped; load_layer reads OUT."""
    with _errors_in_words():
        from k3jax.compare.run import parse_layers
        from k3jax.compiling import keep_compiled_programs
        from k3jax.config import K3Config
        from k3jax.convert import run
        from k3jax.options import LoadOptions
        from k3jax.progress import bytes_bar, progress_bar
        from sharding import make_mesh
        from sharding.mesh import parse_mesh
        from sharding.simulated import simulate_devices

        sizes = parse_mesh(mesh)
        if mesh:
            simulate_devices(sizes.devices)
        keep_compiled_programs()
        layer_count = K3Config.from_pretrained(folder).num_hidden_layers
        request = run.Request(
            source=folder,
            target=out,
            layers=None if layers is None else parse_layers(layers, layer_count),
            recipe=recipe,
            implementation=implementation,
            mesh=make_mesh(sizes.data, sizes.expert, sizes.tensor) if mesh else None,
            options=LoadOptions(quantize_plain=quantize_plain, dense_weights=dense_weights),
        )
        with bytes_bar(Console(stderr=True)) as progress:
            result = run.convert(request, progress)
        print(f"{out}: {len(result.written)} layers written, {len(result.kept)} were there")
        if result.renewed:
            numbers = ", ".join(map(str, result.renewed))
            print(f"converted again, their source had changed or their record was damaged: {numbers}")
        wrong = []
        if verify:
            with progress_bar(Console(stderr=True)) as progress:
                wrong = run.verify(out, progress)
            print("\n".join(wrong) if wrong else "Everything reads back as it was written.")
    if wrong:
        raise typer.Exit(1)


@app.command()
def bench(
    op: Annotated[
        str,
        typer.Option(
            metavar="OP,...",
            help="Of w13, w2, situ, quantize, schedule, gather, combine; the dense products latent_down, latent_up, "
            "shared_gate_up, shared_down, mlp_gate_up, mlp_down; layer; or ep.",
        ),
    ] = "w13,w2",
    rows: Annotated[
        str, typer.Option(metavar="S,...", help="Routed rows; tokens of a dense product.")
    ] = "128,2048,16384,65536",
    tokens: Annotated[
        str, typer.Option(metavar="T,...", help="Tokens of op layer; of op ep on each rank.")
    ] = "1,8,64,256,1024,8192",
    mesh: Annotated[
        str, typer.Option(metavar="expert=2", help="Ranks of op ep, which needs them; a CPU simulates its devices.")
    ] = "",
    breakdown: Annotated[bool, typer.Option("--breakdown", help="Time every stage of op layer.")] = False,
    groups: Annotated[int, typer.Option(help="Experts on this device.")] = 112,
    distribution: Annotated[
        str, typer.Option(metavar="D,...", help="Rows over experts: uniform, zipf (1/rank), hot (half on one).")
    ] = "uniform",
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="R,...", help="Of bf16, w4a16, w4a8, w4a8_fp8. Default: the w4 ones, of dense products bf16."
        ),
    ] = None,
    implementation: Annotated[str | None, typer.Option(help="Default: the fastest that runs here.")] = None,
    xla: Annotated[bool, typer.Option(help="Time the xla implementation, and jnp.dot, beside.")] = True,
    peers: Annotated[bool, typer.Option("--peers", help="Time Humming and tokamax on the same sizes.")] = False,
    peer_python: Annotated[
        Path | None, typer.Option(metavar="PYTHON", help="One with torch and humming. Default: this one.")
    ] = None,
    hidden: Annotated[int, typer.Option(help="Length of an expert's input and output row.")] = 3584,
    width: Annotated[int, typer.Option(help="Width of an expert.")] = 3072,
    model: Annotated[int, typer.Option(help="Length of a token: dense products, layer, ep.")] = 7168,
    picks: Annotated[int, typer.Option(help="Experts of a token: schedule, gather, combine, layer, ep.")] = 16,
    shared: Annotated[int, typer.Option(min=0, help="Shared experts: dense products, layer, ep.")] = 2,
    intermediate: Annotated[int, typer.Option(help="Width of the MLP of a layer without experts.")] = 33792,
    repeats: Annotated[int, typer.Option(help="Timed calls of each row of the table.")] = 30,
    timer: Annotated[
        Literal["device", "wall"] | None,
        typer.Option(help="The GPU's own times, or the clock. Default: device on a GPU."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random operands and of which experts are busy.")] = 0,
    json: JsonOption = None,
) -> None:
    """Time products of experts and dense ones, SiTU, quantisers or the layer at Kimi K3's sizes, beside device limits.

    Op ep is the layer over several devices: what they exchange, and one device beside it.
    """
    with _errors_in_words():
        if peers:  # their process needs some of the GPU's memory, which JAX would take whole
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        from k3jax import outputs
        from k3jax.bench import console, run
        from k3jax.progress import progress_bar

        if json is not None:
            outputs.require_writable(json)
        request = run.Request(
            ops=_names(op),
            recipes=None if recipe is None else _names(recipe),
            rows=_numbers("--rows", rows),
            groups=groups,
            distributions=_names(distribution),
            hidden=hidden,
            width=width,
            implementation=implementation,
            compare_xla=xla,
            peers=peers,
            peer_python=peer_python,
            repeats=repeats,
            timer=timer,
            seed=seed,
            tokens=_numbers("--tokens", tokens),
            model=model,
            picks=picks,
            shared=shared,
            intermediate=intermediate,
            breakdown=breakdown,
        )
        if mesh or "ep" in request.ops:
            ok = _bench_ep(request, mesh, json)
        else:
            cases = run.plan(request)

            def keep(so_far: run.Run) -> None:
                if json is not None:
                    outputs.write_json(json, run.as_json(so_far))

            with progress_bar(Console(stderr=True)) as progress:
                result = run.run(request, cases, progress, keep)
            console.print_bench(Console(highlight=False), result)
            ok = result.ok
    if not ok:
        raise typer.Exit(1)


def _bench_ep(request: "Request", mesh: str, json: Path | None) -> bool:
    """The part of `bench` that runs over a mesh; whether its results are right."""
    from k3jax import outputs
    from k3jax.bench import ep_console, ep_run
    from k3jax.progress import progress_bar
    from sharding.mesh import parse_mesh
    from sharding.simulated import simulate_devices

    sizes = parse_mesh(mesh)
    simulate_devices(sizes.devices)
    cases = ep_run.plan(request, sizes)

    def keep(so_far: ep_run.EpRun) -> None:
        if json is not None:
            outputs.write_json(json, ep_run.as_json(so_far))

    with progress_bar(Console(stderr=True)) as progress:
        result = ep_run.measure(request, cases, progress, keep)
    ep_console.print_ep(Console(highlight=False), result)
    return result.ok


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _numbers(option: str, text: str) -> tuple[int, ...]:
    if not all(part.isdecimal() for part in _names(text)):
        raise ValueError(f"{option} {text!r} must be whole numbers such as 128,2048")
    return tuple(int(part) for part in _names(text))


@contextlib.contextmanager
def _errors_in_words() -> Iterator[None]:
    """Turns what the library raises for a caller's mistake into one message and exit status 2."""
    try:
        yield
    except (ValueError, OSError, NotImplementedError) as error:
        Console(stderr=True, highlight=False).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        raise typer.Exit(2) from None
