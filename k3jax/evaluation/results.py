"""What an evaluation leaves behind: the outputs as a capture, and the statistics as JSON."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from k3jax.checkpoint.safetensors_file import DTYPES
from k3jax.checkpoint.safetensors_writer import NewTensor, write_header
from k3jax.compare.capture import FORMAT
from k3jax.evaluation.run import Keep, LayerStatistics, Plan
from k3jax.outputs import jsonable

STATISTICS_FORMAT = "k3jax-evaluation-1"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@contextlib.contextmanager
def capture_writer(path: Path, plan: Plan) -> Iterator[Keep]:
    """A function that takes the outputs of `evaluate` and writes them, with the inputs, as a capture at `path`.

    `k3jax compare --against` reads the file, and it serves as the token file of another evaluation. It appears when all
    is written; a failure leaves nothing.
    """
    inputs = {layer: plan.tokens.of_layer(layer) for layer in plan.layers}
    tensors = [
        NewTensor(f"layers.{layer}.{stage}", _NAMES[rows.dtype.newbyteorder("<")], rows.shape)
        for layer, rows in sorted(inputs.items(), key=lambda item: -item[1].dtype.itemsize)
        for stage in ("input", "output")
    ]
    metadata = {
        "format": FORMAT,
        "engine": f"k3jax {version('k3jax')}, {plan.request.mesh or 'one device'}, {plan.request.layout} tokens",
        "recipe": plan.request.recipe,
        "rounding_order": "official",
    }
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}.unfinished")
    try:
        with unfinished.open("xb") as file:
            write_header(file, tensors, metadata)
            start = file.tell()
            file.truncate(start + sum(tensor.nbytes for tensor in tensors))
        arrays = _mapped(unfinished, tensors, start)

        def keep(layer: int, first: int, output: np.ndarray) -> None:
            last = first + len(output)
            arrays[f"layers.{layer}.input"][first:last] = inputs[layer].read(first, last)
            arrays[f"layers.{layer}.output"][first:last] = output

        yield keep
        for array in arrays.values():
            array.flush()
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _mapped(path: Path, tensors: list[NewTensor], start: int) -> dict[str, np.memmap]:
    arrays = {}
    for tensor in tensors:
        arrays[tensor.name] = np.memmap(path, DTYPES[tensor.dtype], "r+", start, tensor.shape)
        start += tensor.nbytes
    return arrays


def as_json(plan: Plan, statistics: list[LayerStatistics]) -> dict[str, Any]:
    """The statistics and what they were made of; STATISTICS_FORMAT names this layout."""
    request = plan.request
    layers = [jsonable(layer) | {"tokens_per_second": layer.tokens_per_second} for layer in statistics]
    return {
        "format": STATISTICS_FORMAT,
        "checkpoint": str(request.checkpoint),
        "tokens": str(request.tokens),
        "mesh": jsonable(request.mesh),
        "layout": request.layout,
        "recipe": request.recipe,
        "batch": request.batch,
        "hosts": jax.process_count(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "layers": layers,
    }
