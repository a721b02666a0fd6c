"""Cuts experts out of one layer and heals what is left by layer-wise distillation, or heals it from a capture.

uv run scripts/heal.py --keep 16 --out healed                          # layer 1 of the embedded checkpoint
uv run scripts/heal.py --checkpoint DIR --layer 5 --keep 448 --by load --teacher capture.safetensors --out healed
uv run scripts/heal.py --checkpoint DIR --keep 448 --mesh expert=8 --out healed    # over all GPUs of this host
uv run scripts/heal.py --synthetic --keep 112 --steps 10               # a layer at the release's widths, without files

The teacher is the whole layer, or what an engine computed with it (docs/captures.md). Prints the relative L2 error of
the output on tokens that were not trained on, before and after. docs/training.md describes the method.

Exit status: 0 the error is lower than before; 1 it is not, or training diverged; 2 the request is wrong.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from k3jax import K3Config, default_checkpoint, outputs, save_layer
from k3jax.healing import memory, run
from k3jax.healing.loss import LossWeights
from k3jax.healing.optimizer import Schedule, usual_rate
from k3jax.healing.plot import loss_plot
from k3jax.healing.synthetic import real_widths
from k3jax.healing.training import Plan
from k3jax.merging import merge_adapters
from k3jax.progress import progress_bar
from k3jax.saving import save_adapters
from sharding.mesh import parse_mesh
from sharding.simulated import simulate_devices


class Layout(StrEnum):
    """Where tokens lie on a mesh."""

    REPLICATED = "replicated"
    SHARDED = "sharded"


class Rule(StrEnum):
    """Which experts are worth keeping."""

    LOAD = "load"
    WEIGHTED_LOAD = "weighted-load"
    OUTPUT_NORM = "output-norm"


def main(
    checkpoint: Annotated[Path | None, typer.Option(help="Checkpoint folder. Default: a small embedded one.")] = None,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="A random layer at the release's widths, with twice --keep experts.")
    ] = False,
    layer: Annotated[int, typer.Option(min=0, help="Which layer, from 0.")] = 1,
    keep: Annotated[int | None, typer.Option(min=1, help="How many experts to keep. Default: all.")] = None,
    by: Annotated[Rule, typer.Option(help="What an expert is worth: its rows, their weights, or what it adds.")] = (
        Rule.OUTPUT_NORM
    ),
    teacher: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A capture of the layer's input and output. Default: the layer.")
    ] = None,
    recipe: Annotated[str, typer.Option(help="Of the student: bf16, w4a16, w4a8 or w4a8_fp8.")] = "w4a16",
    implementation: Annotated[
        str | None, typer.Option(help="Of the GEMMs. Default: the fastest that runs here.")
    ] = None,
    dense_weights: Annotated[str, typer.Option(help="Of the student: bf16, or fp8 (then they are frozen).")] = "bf16",
    adapter_rank: Annotated[int, typer.Option(min=0, help="Rank of adapters on the experts. Default: none.")] = 0,
    adapter_scale: Annotated[float, typer.Option(help="What adapters add is multiplied by this.")] = 1.0,
    share_adapters: Annotated[bool, typer.Option("--share-adapters", help="One adapter for all experts.")] = False,
    adapters: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep adapters apart, in this file. Default: merge them.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=8, help="Tokens, one in 8 held out. Default: 8192.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the optimiser.")] = 300,
    batch: Annotated[int, typer.Option(min=1, help="Tokens a step.")] = 256,
    accumulate: Annotated[int, typer.Option(min=1, help="Micro-batches that a step is split into.")] = 1,
    learning_rate: Annotated[
        float | None, typer.Option(help="The schedule's highest. Default: 2.5 / hidden size.")
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Steps up to it.")] = 10,
    weight_decay: Annotated[float, typer.Option(help="Of matrices.")] = 0.0,
    clip: Annotated[float, typer.Option(help="Largest norm of the gradient.")] = 1.0,
    latent_weight: Annotated[float, typer.Option(help="Of the normed latent's error in the loss.")] = 0.1,
    balance_weight: Annotated[float, typer.Option(help="Of the router's imbalance in the loss.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of tokens and batches.")] = 0,
    states: Annotated[Path | None, typer.Option(help="Folder of states; a run that finds one there resumes.")] = None,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between states.")] = 50,
    mesh: Annotated[
        str, typer.Option(metavar="expert=4,tensor=2", help="Over a mesh; a CPU simulates its devices.")
    ] = "",
    tokens_layout: Annotated[Layout, typer.Option(help="On a mesh: all tokens on every rank, or split.")] = (
        Layout.REPLICATED
    ),
    measure: Annotated[int, typer.Option(min=0, help="Afterwards time so many steps, and forward passes.")] = 0,
    out: Annotated[Path | None, typer.Option(help="New checkpoint folder for the healed layer.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Plot of the error over the steps.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Log of the run.")] = None,
) -> None:
    """Cut experts out of a layer, heal what is left, and save it as a checkpoint."""
    console = Console(stderr=True, highlight=False)
    try:
        sizes = parse_mesh(mesh) if mesh else None
        if sizes is not None:
            simulate_devices(sizes.devices)
        for file in filter(None, (plot, json_file, adapters)):
            outputs.require_writable(file)
        if out is not None and out.exists():
            raise FileExistsError(f"{out} exists; choose a new folder, or remove it")
        if adapters is not None and not adapter_rank:
            raise ValueError("--adapters keeps what --adapter-rank makes: give a rank")
        folder = None if synthetic else checkpoint or default_checkpoint()
        hidden = (real_widths(16) if folder is None else K3Config.from_pretrained(folder)).hidden_size
        highest = usual_rate(hidden) if learning_rate is None else learning_rate
        schedule = Schedule(steps, highest, min(warmup, steps - 1), weight_decay, clip)
        losses = LossWeights(latent=latent_weight, balance=balance_weight)
        request = run.Request(
            checkpoint=folder,
            plan=Plan(schedule, batch, accumulate, losses, seed, save_every),
            layer=layer,
            keep=keep,
            by=by.value,
            recipe=recipe,
            implementation=implementation,
            teacher=teacher,
            tokens=tokens,
            states=states,
            adapters=run.Adapters(adapter_rank, adapter_scale, share_adapters) if adapter_rank else None,
            dense_weights=dense_weights,
            mesh=sizes,
            layout=tokens_layout.value,
            measure=measure,
        )
        result = _heal(request, console)
        _print_costs(result)
        if json_file is not None:
            outputs.write_json(json_file, run.as_json(result))
        if plot is not None:
            outputs.write_text(plot, _plot(result))
        if run.improved(result):
            _save(result, out, adapters)
    except (ValueError, NotImplementedError, OSError) as error:
        console.print(f"[red]error:[/] {error}", highlight=False)
        raise typer.Exit(2) from None
    failure = run.failure(result)
    if failure is not None:
        unsaved = "" if run.improved(result) or (out, adapters) == (None, None) else "; nothing was saved"
        console.print(f"[red]error:[/] {failure}{unsaved}", highlight=False)
        raise typer.Exit(1)


def _save(result: run.Result, out: Path | None, adapters: Path | None) -> None:
    """The layer as a checkpoint folder, and its adapters in a file of their own or merged."""
    healed = result.healed.layer
    if adapters is not None:
        print(f"adapters: {save_adapters(healed, adapters)}")
    if out is None:
        return
    if adapters is not None:
        healed.adapters = None  # the file has them
    elif result.request.adapters is not None:
        print(f"merged: {merge_adapters(healed)}")
    source = result.request.checkpoint or result.config
    assert source is not None
    print(f"saved: {save_layer(run.to_save(result), out, index=result.request.layer, source=source)}")


def _heal(request: run.Request, console: Console) -> run.Result:
    """Runs it with a bar, and ten lines of progress where there is no terminal to draw one on."""
    with progress_bar(console) as bar:

        def show(done: int, total: int, what: str) -> None:
            bar(done, total, what)
            if not console.is_terminal and (done * 10 // total) > ((done - 1) * 10 // total):
                print(f"step {done}/{total}: {what}", flush=True)

        return run.heal(request, show, lambda line: print(line, flush=True))


def _print_costs(result: run.Result) -> None:
    rate = result.healed.tokens_per_second
    speed = "" if rate is None else f"{rate:,.0f} tokens/s in training, "
    print(f"{speed}{result.seconds:.0f} s in all")
    cut = "" if result.cut_bytes is None else f"{_bytes(result.cut_bytes)} while experts were cut; "
    bound = result.activation_bytes
    activations = "" if bound is None else f" + activations below {_bytes(bound)}"
    peak = "" if result.peak_bytes is None else f"; at most {_bytes(result.peak_bytes)} at once"
    print(
        f"memory{' of each device' if result.request.mesh else ''}: {cut}in training {_bytes(result.frozen_bytes)} "
        f"frozen (no gradient, no optimiser state) + {_bytes(result.trained_bytes)} trained "
        f"({memory.BYTES_A_PARAMETER} bytes a parameter){activations}{peak}"
    )
    if result.times is not None:
        times = result.times
        print(
            f"a step takes {1e3 * times.step:.1f} ms ({times.tokens_per_second:,.0f} tokens/s), of which the forward "
            f"pass {1e3 * times.forward:.1f} ms ({100 * times.forward_share:.0f} %); medians of {times.repeats}"
        )


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _plot(result: run.Result) -> str:
    series = {"output": [record["output"] ** 0.5 for record in result.healed.history]}
    if "latent" in result.healed.history[0]:
        series["normed latent"] = [record["latent"] ** 0.5 for record in result.healed.history]
    marks = {"held out, before": result.before["output"], "held out, after": result.after["output"]}
    return loss_plot(series, marks, f"Relative L2 error of layer {result.request.layer} while healing")


if __name__ == "__main__":
    typer.run(main)
