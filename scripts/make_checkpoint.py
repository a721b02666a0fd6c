"""Makes a Kimi K3 checkpoint of random weights, in the release's layout and of any size.

uv run scripts/make_checkpoint.py small                                        # the embedded sizes, 16 MB
uv run scripts/make_checkpoint.py wide --real-widths --experts 16 --top-k 4    # the release's widths, 2.1 GB
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from k3jax.checkpoint.synthetic import synthetic_config, write_checkpoint

REAL_WIDTHS = {"hidden_size": 7168, "intermediate_size": 33792, "latent_size": 3584, "expert_width": 3072}


class PlainDtype(StrEnum):
    """How routed experts may be stored unpacked."""

    BF16 = "BF16"
    F16 = "F16"
    F32 = "F32"


def make(
    folder: Annotated[Path, typer.Argument(help="New folder to write.")],
    hidden: Annotated[int | None, typer.Option(min=32, help="hidden_size (default 512).")] = None,
    dense_width: Annotated[int | None, typer.Option(min=32, help="intermediate_size (default 1024).")] = None,
    latent: Annotated[int | None, typer.Option(min=32, help="routed_expert_hidden_size (default 256).")] = None,
    expert_width: Annotated[int | None, typer.Option(min=32, help="moe_intermediate_size (default 192).")] = None,
    experts: Annotated[int, typer.Option(min=1, help="num_experts.")] = 32,
    top_k: Annotated[int, typer.Option(min=1, help="num_experts_per_token.")] = 4,
    shared: Annotated[int, typer.Option(min=0, help="num_shared_experts.")] = 2,
    moe_layers: Annotated[
        int | None, typer.Option(min=0, help="Layers of experts (default 3, or 1 with --real-widths).")
    ] = None,
    dense: Annotated[bool, typer.Option(help="Begin with a dense layer, as the release does.")] = True,
    real_widths: Annotated[
        bool, typer.Option("--real-widths", help="The release's widths (7168, 33792, 3584, 3072), unless given.")
    ] = False,
    plain_experts: Annotated[
        PlainDtype | None, typer.Option(help="Store routed experts unpacked, in this dtype.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes everywhere.")] = 0,
) -> None:
    """Make a Kimi K3 checkpoint of random weights, in the release's layout and of any size."""
    widths = {
        "hidden_size": hidden,
        "intermediate_size": dense_width,
        "latent_size": latent,
        "expert_width": expert_width,
    }
    given = {name: value for name, value in widths.items() if value is not None}
    if moe_layers is None:
        moe_layers = 1 if real_widths else 3
    config = synthetic_config(
        **((REAL_WIDTHS if real_widths else {}) | given),
        num_experts=experts,
        top_k=top_k,
        shared_experts=shared,
        layers=moe_layers + dense,
        dense_layers=int(dense),
    )
    console = Console(stderr=True)
    columns = ("[progress.description]{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("Writing", total=None)
            write_checkpoint(
                folder,
                config,
                seed=seed,
                plain_experts=plain_experts,
                progress=lambda done, total: progress.update(task, completed=done, total=total),
            )
    except (ValueError, OSError) as error:
        console.print(f"[red]error:[/] {error}", highlight=False)
        raise typer.Exit(1) from None
    files = [path.stat().st_size for path in folder.iterdir()]
    print(f"{folder}: {len(files)} files, {sum(files) / 1e6:,.1f} MB")


if __name__ == "__main__":
    typer.run(make)
