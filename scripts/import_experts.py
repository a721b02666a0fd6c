"""Brings one layer's experts from another engine's memory layout back to a checkpoint in the release's layout.

uv run scripts/import_experts.py CHECKPOINT ENGINE.safetensors OUT --layer 1 --layout trtllm --digest 5f3c...
uv run scripts/import_experts.py CHECKPOINT --layer 1 --digest-only        # the digest of the checkpoint's own experts

ENGINE.safetensors holds that layer's w13_weight, w13_weight_scale, w2_weight and w2_weight_scale, stacked over experts.
OUT gets the layer's other tensors from CHECKPOINT, and loads like any checkpoint (it has this one layer).
"""

import shutil
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from k3jax.checkpoint import CONFIG, SINGLE, Checkpoint
from k3jax.checkpoint.engine_experts import LAYOUTS, experts_digest, release_experts
from k3jax.checkpoint.safetensors_file import DTYPES, SafetensorsFile
from k3jax.checkpoint.safetensors_writer import write_safetensors
from k3jax.checkpoint.tensor_table import EXPERTS


def import_experts(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of the same model: config and other tensors.")],
    engine: Annotated[Path | None, typer.Argument(help="The engine's arrays.")] = None,
    out: Annotated[Path | None, typer.Argument(help="New folder.")] = None,
    layer: Annotated[int, typer.Option(help="Which layer, from 0.")] = 1,
    layout: Annotated[str, typer.Option(help=f"One of {', '.join(LAYOUTS)}.")] = "",
    digest: Annotated[str, typer.Option(help="Of the dequantised values.")] = "",
    digest_only: Annotated[bool, typer.Option("--digest-only", help="Print the digest of CHECKPOINT's layer.")] = False,
) -> None:
    """Bring one layer's experts from another engine's layout back to the release's."""
    opened = Checkpoint.open(checkpoint)
    tensors = opened.read_layer(layer)
    if digest_only:
        print(experts_digest(tensors))
        return
    if engine is None or out is None:
        raise typer.BadParameter("ENGINE.safetensors and OUT are needed, or --digest-only")
    experts = release_experts(dict(SafetensorsFile(engine)), layout=layout, digest=digest)
    prefix = next(iter(tensors.places.values())).name.partition(f"layers.{layer}.")[0] + f"layers.{layer}."
    rest = {name: place for name, place in tensors.places.items() if not name.startswith(EXPERTS)}
    found: dict[str, tuple[str, np.ndarray]] = {
        prefix + name: (place.entry.dtype, tensors[name]) for name, place in rest.items()
    }
    found |= {prefix + name: ("U8", tensor) for name, tensor in experts.items()}
    out.mkdir()
    write_safetensors(out / SINGLE, dict(sorted(found.items(), key=lambda item: -DTYPES[item[1][0]].itemsize)))
    shutil.copy(checkpoint / CONFIG, out / CONFIG)
    print(f"{out}: layer {layer}, {len(experts)} tensors of experts, digest {digest}")


if __name__ == "__main__":
    typer.run(import_experts)
