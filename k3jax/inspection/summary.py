"""What a checkpoint folder holds, without reading a tensor: the config, the index, and the headers of the shards.

Shards that are not there (a partial download) are counted, not an error; whatever is there is held to the table of
tensors that the config asks for.
"""

import contextlib
import dataclasses
import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from k3jax.checkpoint import Checkpoint
from k3jax.checkpoint.safetensors_file import TensorEntry
from k3jax.checkpoint.tensor_table import EXPERTS, MOE, Inventory, classify
from k3jax.config import K3Config
from k3jax.inspection.memory import ModelMemory, model_memory
from k3jax.strict_json import shown
from sharding.mesh import MeshSizes

FORMAT = "k3jax-inspect-1"
_SHOWN = 20  # Problems of one kind that are spelled out; the rest are counted.
_KINDS = (
    ("routed experts", EXPERTS),
    ("shared experts", f"{MOE}shared_experts."),
    ("latent", f"{MOE}routed_expert_"),
    ("router", f"{MOE}gate."),
    ("dense MLP", "mlp."),
)


@dataclasses.dataclass(frozen=True)
class Kind:
    """Tensors of one kind: how many names, and what the headers at hand say of their dtypes and bytes.

    Attributes:
        read: by k3jax; the others belong to parts of the model that it does not compute.
        dtypes: dtype -> how many tensors. bytes: of the tensors whose shards are there.
    """

    name: str
    read: bool
    count: int
    dtypes: dict[str, int]
    bytes: int


@dataclasses.dataclass(frozen=True)
class Problems:
    """Everything that keeps layers from loading, by kind: how many, and the first few of them in words."""

    counts: dict[str, int]
    examples: dict[str, tuple[str, ...]]

    @property
    def ok(self) -> bool:
        """Whether there are none."""
        return not self.counts


@dataclasses.dataclass(frozen=True)
class Inspection:
    """A checkpoint folder. `shards` counts files; `absent` are those that the index names and the folder lacks."""

    path: Path
    config: K3Config
    tensors: int
    shards: int
    absent: tuple[str, ...]
    dense_layers: tuple[int, ...]
    moe_layers: tuple[int, ...]
    kinds: tuple[Kind, ...]
    problems: Problems
    mesh: MeshSizes
    memory: tuple[ModelMemory, ...]


def inspect_checkpoint(
    path: str | Path, sizes: MeshSizes, progress: Callable[[int, int, str], None] = lambda done, total, what: None
) -> Inspection:
    """Looks at a checkpoint folder, and at what its weights take on each device of a mesh.

    Raises:
        FileNotFoundError, ValueError, NotImplementedError: there is no readable config or index, or the mesh cannot
            split the model. What is wrong with single tensors and shards is listed instead.
    """
    with _uncollected():
        return _inspect(Checkpoint.open(path), sizes, progress)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Half a million names and entries stay alive anyway: looking for garbage among them takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _inspect(checkpoint: Checkpoint, sizes: MeshSizes, progress: Callable[[int, int, str], None]) -> Inspection:
    config = checkpoint.config
    memory = tuple(model_memory(config, sizes, packed=packed) for packed in (True, False))
    inventory = classify(checkpoint.names, config)
    found: dict[str, list[str]] = {
        "doubled": [shown(name) for name in inventory.doubled],
        "unknown": [shown(name) for name in inventory.unknown],
        "missing": [f"layer {layer}: {suffix}" for layer, names in inventory.missing.items() for suffix in names],
    }
    headers, absent, found["unreadable shards"] = _headers(checkpoint, progress)
    entries = {name: headers[file].get(name) for name, file in checkpoint.names.items() if file in headers}
    found["in the index only"] = [shown(name) for name, entry in entries.items() if entry is None]
    found["in a shard only"] = [
        f"{shown(name)} in {file}" for file, there in headers.items() for name in there if name not in checkpoint.names
    ]
    read, found["wrong dtype or shape"] = _read_tensors(inventory, entries)
    rest = [
        _kind(label, False, [entries.get(name) for name in names]) for label, names in inventory.out_of_scope.items()
    ]
    is_moe = {layer: config.is_moe(layer) for layer in range(config.num_hidden_layers)}
    return Inspection(
        path=checkpoint.path,
        config=config,
        tensors=len(checkpoint.names),
        shards=len(headers) + len(absent) + len(found["unreadable shards"]),
        absent=absent,
        dense_layers=tuple(layer for layer, moe in is_moe.items() if not moe),
        moe_layers=tuple(layer for layer, moe in is_moe.items() if moe),
        kinds=(*read, *rest),
        problems=_problems(found),
        mesh=sizes,
        memory=memory,
    )


def as_json(inspection: Inspection) -> dict[str, Any]:
    """The inspection with its totals spelled out; FORMAT names this layout."""
    values = {field.name: getattr(inspection, field.name) for field in dataclasses.fields(inspection)}
    activation = inspection.config.activation
    config = dataclasses.asdict(inspection.config)
    config["activation"] = {"kind": type(activation).__name__, **dataclasses.asdict(activation)}
    memory = [
        dataclasses.asdict(item)
        | {"total": item.total}
        | {name: dataclasses.asdict(layer) | {"total": layer.total} for name, layer in _layers(item)}
        for item in inspection.memory
    ]
    return {"format": FORMAT, "ok": inspection.problems.ok} | values | {"config": config, "memory": memory}


def _layers(memory: ModelMemory) -> Iterator[tuple[str, Any]]:
    yield from ((name, layer) for name, layer in (("dense", memory.dense), ("moe", memory.moe)) if layer is not None)


Headers = dict[str, Mapping[str, TensorEntry]]  # by file
Entries = Mapping[str, TensorEntry | None]  # by name; a tensor has None or nothing if it is not where the index says


def _headers(
    checkpoint: Checkpoint, progress: Callable[[int, int, str], None]
) -> tuple[Headers, tuple[str, ...], list[str]]:
    """The headers of all shards at hand; the names of absent ones; what is wrong with unreadable ones."""
    headers: Headers = {}
    absent, unreadable = [], []
    files = sorted(set(checkpoint.names.values()))
    for done, file in enumerate(files):
        progress(done, len(files), "reading headers")
        try:
            headers[file] = checkpoint.shard(file).entries
        except FileNotFoundError:
            absent.append(file)
        except (ValueError, OSError) as error:
            unreadable.append(str(error))
    progress(len(files), len(files), "done")
    return headers, tuple(absent), unreadable


def _read_tensors(inventory: Inventory, entries: Entries) -> tuple[list[Kind], list[str]]:
    """The tensors of layers' MLPs in the order of _KINDS, and what is wrong with their dtypes and shapes."""
    found: dict[str, list[TensorEntry | None]] = {label: [] for label, _ in _KINDS}
    wrong: list[str] = []
    table, expected = None, {}
    for layer, names in inventory.mlp.items():
        if inventory.tables[layer] is not table:  # Layers that are alike share one.
            table = inventory.tables[layer]
            expected = {suffix: (spec, found[_label(suffix)]) for suffix, spec in table.specs.items()}
        for suffix, name in names.items():
            entry, (spec, of_kind) = entries.get(name), expected[suffix]
            of_kind.append(entry)
            if entry is not None and (entry.dtype not in spec.dtypes or not spec.allows(entry.shape)):
                wanted = f"{' or '.join(spec.dtypes)} {list(spec.shape)}"
                wrong.append(f"{shown(name)} is {entry.dtype} {list(entry.shape)}, not {wanted}")
    return [_kind(label, True, of_kind) for label, of_kind in found.items() if of_kind], wrong


def _label(suffix: str) -> str:
    return next(label for label, start in _KINDS if suffix.startswith(start))


def _kind(label: str, read: bool, entries: list[TensorEntry | None]) -> Kind:
    """`entries` has None for a tensor whose shard is not there."""
    here = [entry for entry in entries if entry is not None]
    dtypes = Counter(entry.dtype for entry in here)
    return Kind(label, read, len(entries), dict(dtypes), sum(entry.nbytes for entry in here))


def _problems(found: Mapping[str, list[str]]) -> Problems:
    kept = {kind: texts for kind, texts in found.items() if texts}
    counts = {kind: len(texts) for kind, texts in kept.items()}
    return Problems(counts, {kind: tuple(texts[:_SHOWN]) for kind, texts in kept.items()})
