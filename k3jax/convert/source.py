"""What identifies the checkpoint that a conversion was made from, so that a changed one is noticed."""

import hashlib
from pathlib import Path
from typing import Any

from k3jax.checkpoint import CONFIG, INDEX, Checkpoint, LayerTensors

Shards = dict[str, dict[str, Any]]
"""File name -> its size, the digest of its header and when it was last written to."""


def model_digests(checkpoint: Checkpoint) -> dict[str, str | None]:
    """The digests of the config and of the index; None without an index."""
    return {"config": _digest(checkpoint.path / CONFIG), "index": _digest(checkpoint.path / INDEX)}


def shards_of(tensors: LayerTensors) -> Shards:
    """The files that a layer's tensors lie in."""
    files = {place.file.path.name: place.file for place in tensors.places.values()}
    return {
        name: {"bytes": file.size, "header_sha256": file.header_sha256, "modified_ns": file.modified_ns}
        for name, file in sorted(files.items())
    }


def _digest(path: Path) -> str | None:
    if not path.exists():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
