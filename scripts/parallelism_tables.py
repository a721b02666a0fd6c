"""The tables of docs/parallelism.md: what layouts of Kimi K3 cost in bytes, seconds and memory, by a model.

uv run scripts/parallelism_tables.py             # print them
uv run scripts/parallelism_tables.py --update    # put them into the document
"""

import argparse
import dataclasses
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from k3jax.config import K3Config
from k3jax.inspection.collectives import layer_collectives
from k3jax.inspection.console import readable
from k3jax.inspection.dispatch_memory import dispatch_memory
from k3jax.inspection.memory import model_memory
from k3jax.moe import moe_layout
from k3jax.options import LoadOptions
from sharding import MeshSizes, make_mesh
from sharding.simulated import simulate_devices
from sharding.traffic import TRANSPORTS, Exchange, Fabric, all_reduce_bytes, crossover_tokens, seconds

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "parallelism.md"
CONFIG = ROOT / "tests" / "data" / "k3-config.json"

OVERHEAD = 20e-6  # assumed: what per_rank takes more a layer, whatever the number of tokens
EXPERT_RANKS = (8, 16, 32, 56, 64)


@dataclasses.dataclass(frozen=True)
class Machine:
    """A GPU and what connects it to others: vendors' figures, in bytes and operations a second and way.

    Attributes:
        gpus: in one of its nodes or racks. memory: bytes. read: bandwidth of the memory. product: bfloat16 operations.
    """

    name: str
    gpus: int
    memory: float
    read: float
    product: float
    fabric: Fabric


H200 = Machine("8 x H200", 8, 141e9, 4.8e12, 0.989e15, Fabric(8, 450e9, 50e9))
B200 = Machine("8 x B200", 8, 180e9, 8e12, 2.25e15, Fabric(8, 900e9, 50e9))
B300 = Machine("8 x B300", 8, 288e9, 8e12, 2.25e15, Fabric(8, 900e9, 100e9))
RACK = Machine("rack of 72 GB200", 72, 186e9, 8e12, 2.5e15, Fabric(72, 900e9, 50e9))


def exchange(config: K3Config, ranks: int, **formats: str) -> Exchange:
    """Between the ranks of one MoE layer of the model."""
    assert config.num_experts is not None
    return Exchange(config.num_experts, config.experts_per_token, config.latent_size, ranks, **formats)


def machines(config: K3Config) -> str:
    """What the other tables assume of hardware."""
    del config
    rows = [
        (
            machine.name,
            f"{machine.memory / 1e9:.0f} GB",
            f"{machine.read / 1e12:g} TB/s",
            f"{machine.product / 1e15:g} PFLOP/s",
            f"{machine.fabric.link / 1e9:.0f} GB/s",
            f"{machine.fabric.network / 1e9:.0f} GB/s",
        )
        for machine in (H200, B200, B300, RACK)
    ]
    return table(("of each GPU", "memory", "reads", "bf16 products", "sends in its node or rack", "sends beyond"), rows)


def rows_a_token(config: K3Config) -> str:
    """Copies of a token's row that leave its rank."""
    rows = []
    for ranks in EXPERT_RANKS:
        each = exchange(config, ranks)
        sent = [f"{each.rows(transport):.1f}" for transport in TRANSPORTS]
        rows.append((f"EP{ranks}", f"{each.hit_probability:.1%}", *sent, f"{each.num_experts // ranks}"))
    return table(("", "a rank is hit", "`all_gather`", "`per_rank`", "a copy a pick", "experts a rank"), rows)


def bytes_a_token(config: K3Config) -> str:
    """What a rank sends for each of its tokens in one layer."""
    formats = ({"back": "f32"}, {"back": "bf16"}, {"out": "mxfp8", "back": "bf16"})
    rows = []
    for ranks in EXPERT_RANKS:
        kinds = [exchange(config, ranks, **each) for each in formats]
        sent = [each.bytes(transport) for transport in ("all_gather", "per_rank") for each in kinds]
        rows.append((f"EP{ranks}", *(f"{size / 1000:.0f}" for size in sent)))
    whats = ("f32 back", "bf16 back", "and MXFP8 out")
    heads = [f"`{transport}`, {what}" for transport in ("all_gather", "per_rank") for what in whats]
    return table(("kB a token and layer", *heads), rows)


def collectives(config: K3Config) -> str:
    """What each of eight ranks does in one MoE layer with 1,024 tokens of its own, or of its group."""
    kinds: dict[str, tuple[str, str, dict[str, Any]]] = {
        "replicated": ("replicated", "w4a16", {}),
        "sharded, `all_gather`": ("sharded", "w4a16", {"transport": "all_gather"}),
        "sharded, `per_rank`": ("sharded", "w4a16", {"transport": "per_rank"}),
        "the same, `w4a8`": ("sharded", "w4a8", {"transport": "per_rank"}),
        "`split_shared` adds": ("sharded", "w4a16", {"transport": "all_gather", "split_shared": True}),
    }
    mesh = make_mesh(expert=8)
    rows = []
    for kind, (tokens, recipe, options) in kinds.items():
        layout = moe_layout(config, recipe, mesh, tokens, LoadOptions(**options))
        found = layer_collectives(config, layout, 1024)
        if "split_shared" in options:
            found = [each for each in found if each.what in ("tokens", "shared")]
        for each in found:
            shape = f"{each.dtype}[{', '.join(map(str, each.shape))}]"
            average = "" if each.rows is None else " on average"
            rows.append((kind, each.what, each.op, shape, f"{readable(round(each.sent))}{average}"))
            kind = ""
    return table(("`tokens`", "what", "collective", "each rank puts in", "and sends"), rows)


def all_reduce(config: K3Config) -> str:
    """What a rank sends for each token of its group where tokens are replicated."""
    columns = config.hidden_size + config.latent_size
    rows = [
        (f"{ranks} ranks", *(f"{all_reduce_bytes(columns, ranks, wire) / 1000:.0f}" for wire in ("f32", "bf16")))
        for ranks in (2, 4, 8, 16, 32, 64)
    ]
    return table(("kB a token and layer", 'wire="f32"', 'wire="bf16"'), rows)


def seconds_on_the_wire(config: K3Config) -> str:
    """Both transports at the full rates of a fabric."""
    rows = []
    for machine in (H200, B300, RACK):
        for ranks in (8, 16, 32, 64):
            each = exchange(config, ranks, back="bf16")
            took = [1000 * seconds(each, transport, machine.fabric) for transport in ("all_gather", "per_rank")]
            tokens = crossover_tokens(each, machine.fabric, OVERHEAD)
            crossover = "never" if tokens == float("inf") else f"{tokens:,.0f} tokens"
            where = f"{-(-ranks // machine.gpus)} x ({machine.name})"
            rows.append((where, f"EP{ranks}", *(f"{1e6 * value:.0f}" for value in took), crossover))
    return table(("us for 1,000 tokens a rank", "", "`all_gather`", "`per_rank`", "`per_rank` is faster from"), rows)


def memory(config: K3Config) -> str:
    """Weights of all layers on one GPU, experts in MXFP4."""
    layouts: tuple[dict[str, Any], ...] = (
        {"tokens": "replicated"},
        {"tokens": "sharded"},
        {"tokens": "sharded", "options": LoadOptions(split_shared=True)},
        {"tokens": "sharded", "options": LoadOptions(dense_weights="fp8")},
    )
    rows = []
    for ranks in (1, *EXPERT_RANKS):
        whole = model_memory(config, MeshSizes(expert=ranks), packed=True, tokens="sharded")
        assert whole.moe is not None
        routed = whole.moe_layers * whole.moe.routed_experts / 1e9
        totals = [gigabytes(config, ranks, **layout) for layout in layouts]
        said = ["does not divide" if total is None else f"{total:,.1f}" for total in totals]
        rows.append((f"EP{ranks}", f"{routed:,.1f}", *said))
    kinds = ("replicated tokens", "sharded tokens", "sharded, `split_shared`", 'sharded, `dense_weights="fp8"`')
    heads = ("GB a GPU", "routed experts alone", *kinds)
    return table(heads, rows)


def buffers(config: K3Config) -> str:
    """What the experts' buffers take on one of eight ranks, while a layer runs."""
    rows = []
    for tokens in (128, 1024, 8192):
        said = []
        for layout, most in (("replicated", 8192), ("sharded", 8192), ("sharded", None)):
            count = tokens * (8 if layout == "sharded" else 1)
            found = dispatch_memory(
                config, MeshSizes(expert=8), count, tokens=layout, options=LoadOptions(max_tokens=most)
            )
            said.append(f"{found.total / 1e9:.2f}")
        rows.append((f"{tokens:,} tokens a rank", *said))
    heads = ("GB a GPU", "replicated tokens", "sharded tokens", "sharded, `max_tokens=None`")
    return table(heads, rows)


def gigabytes(config: K3Config, ranks: int, **layout: Any) -> float | None:
    """All layers' weights on one GPU; None where something cannot be split over so many."""
    try:
        return model_memory(config, MeshSizes(expert=ranks), packed=True, **layout).total / 1e9
    except ValueError:
        return None


def plans(config: K3Config) -> str:
    """What is left of a GPU's memory, and the least time of a layer's parts, tokens sharded."""
    rows = []
    for machine, ranks in ((H200, 8), (H200, 16), (H200, 32), (B200, 8), (B200, 16), (B300, 8), (RACK, 32), (RACK, 64)):
        weights = gigabytes(config, ranks, tokens="sharded")
        assert weights is not None
        each = exchange(config, ranks, back="bf16")
        wire = min(seconds(each, "all_gather", machine.fabric), seconds(each, "per_rank", machine.fabric))
        left = machine.memory / 1e9 - weights
        rows.append(
            (
                f"{-(-ranks // machine.gpus)} x ({machine.name})",
                f"EP{ranks}",
                f"{weights:.0f}",
                f"{left:.0f}" if left > 0 else "does not fit",
                f"{weights * 1e9 / machine.read * 1e3:.1f}",
                f"{1e9 * flop_a_token(config) / machine.product:.0f}",
                f"{1e9 * wire:.0f}",
            )
        )
    heads = (
        "",
        "",
        "weights, GB",
        "left, GB",
        "reading them once, ms",
        "products, us for 1,000 tokens",
        "wire, us for 1,000 tokens",
    )
    return table(heads, rows)


def flop_a_token(config: K3Config) -> float:
    """Operations of one MoE layer for one token."""
    assert config.num_experts is not None
    routed = 3 * config.latent_size * config.expert_width * config.experts_per_token
    shared = 3 * config.hidden_size * config.shared_intermediate_size
    return 2.0 * (routed + shared + config.hidden_size * (2 * config.latent_size + config.num_experts))


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    heads = list(heads)
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *map(list, rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


TABLES: dict[str, Callable[[K3Config], str]] = {
    "machines": machines,
    "rows": rows_a_token,
    "bytes": bytes_a_token,
    "collectives": collectives,
    "all-reduce": all_reduce,
    "seconds": seconds_on_the_wire,
    "memory": memory,
    "buffers": buffers,
    "plans": plans,
}


def updated(document: str, config: K3Config) -> str:
    """`document` with every table made anew: what stands between `<!-- NAME -->` and `<!-- end -->`.

    Raises:
        ValueError: a table is not in the document, or is there twice.
    """
    for name, make in TABLES.items():
        pattern = rf"(<!-- {name} -->\n\n).*?(\n\n<!-- end -->)"
        document, found = re.subn(pattern, lambda match: match[1] + make(config) + match[2], document, flags=re.DOTALL)  # noqa: B023
        if found != 1:
            raise ValueError(f"{DOCUMENT.name} has {found} tables called {name!r}, not one")
    return document


def main() -> None:
    """Prints the tables, or puts them into the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="rewrite docs/parallelism.md")
    update = parser.parse_args().update
    simulate_devices(8)
    config = K3Config.from_pretrained(CONFIG)
    if update:
        DOCUMENT.write_text(updated(DOCUMENT.read_text(), config))
        return
    for name, make in TABLES.items():
        print(f"{name}\n\n{make(config)}\n")


if __name__ == "__main__":
    main()
