"""What `k3jax inspect` prints."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from k3jax.config import K3Config
from k3jax.inspection.memory import LayerMemory, ModelMemory
from k3jax.inspection.summary import Inspection
from pallas_kernels import Situ

_STORAGE = {None: "plain", "mxfp4": "MXFP4", "nvfp4": "NVFP4"}
_PARTS = ("routed_experts", "shared_experts", "latent", "router", "dense")


def print_inspection(console: Console, inspection: Inspection) -> None:
    """The folder, the config, tensors by kind, memory a device, and what is wrong."""
    console.print(Text(str(inspection.path), "bold"), soft_wrap=True)
    absent = f", {len(inspection.absent)} of them not here" if inspection.absent else ""
    console.print(f"{inspection.tensors:,} tensors in {inspection.shards} files{absent}")
    console.print(_config_table(inspection))
    console.print()
    console.print(Text("Tensors", "bold"))
    console.print(_kinds_table(inspection))
    mesh = inspection.mesh
    title = f"Weights on each device, mesh data={mesh.data}, expert={mesh.expert}, tensor={mesh.tensor}"
    console.print(Text(title, "bold"))
    console.print(_memory_table(inspection))
    _print_problems(console, inspection)


def _config_table(inspection: Inspection) -> Table:
    config = inspection.config
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    rows = [
        ("layers", f"{config.num_hidden_layers}: {_layers(inspection)}"),
        ("hidden size", f"{config.hidden_size:,}"),
        ("activation", _activation(config)),
        ("RMSNorm epsilon", f"{config.rms_norm_eps:g}"),
    ]
    if inspection.dense_layers:
        rows.insert(2, ("dense width", f"{config.intermediate_size:,}"))
    if inspection.moe_layers:
        storage = f"{_STORAGE[config.quantization]} by the config"
        rows[-2:-2] = [
            ("experts", f"{config.num_experts} of width {config.expert_width:,}, {storage}"),
            ("latent", _latent(config)),
            ("shared experts", f"{config.num_shared_experts} as one of width {config.shared_intermediate_size:,}"),
            ("router", _router(config)),
        ]
    for name, value in rows:
        table.add_row(Text(name, "dim"), value)
    return table


def _layers(inspection: Inspection) -> str:
    parts = [("dense", inspection.dense_layers), ("mixture of experts", inspection.moe_layers)]
    return ", ".join(f"{_ranges(layers)} {kind}" for kind, layers in parts if layers)


def _ranges(numbers: tuple[int, ...]) -> str:
    """`(0, 1, 2, 5)` -> `"0-2,5"`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def _activation(config: K3Config) -> str:
    kind = config.activation
    return f"SiTU, beta {kind.beta:g}, linear beta {kind.linear_beta}" if isinstance(kind, Situ) else "SwiGLU"


def _latent(config: K3Config) -> str:
    if config.routed_expert_hidden_size is None:
        return "none: experts read the hidden state"
    return f"{config.latent_size:,}, {'with' if config.latent_moe_use_norm else 'without'} a norm"


def _router(config: K3Config) -> str:
    parts = [f"{config.router_activation}, the best {config.experts_per_token} of {config.num_experts}"]
    if config.num_expert_group > config.topk_group:
        parts.append(f"in {config.topk_group} of {config.num_expert_group} groups")
    parts.append("renormalised" if config.renormalize else "not renormalised")
    if config.routed_scaling_factor != 1:
        parts.append(f"times {config.routed_scaling_factor:g}")
    return ", ".join(parts)


def _kinds_table(inspection: Inspection) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("kind")
    table.add_column("tensors", justify="right")
    table.add_column("dtypes")
    table.add_column("size here", justify="right")
    for kind in inspection.kinds:
        dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in sorted(kind.dtypes.items()))
        name = kind.name if kind.read else f"{kind.name} (not read)"
        table.add_row(name, f"{kind.count:,}", dtypes, readable(kind.bytes) if kind.dtypes else "-")
    return table


def _memory_table(inspection: Inspection) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("part")
    for memory in inspection.memory:
        table.add_column("w4a16, w4a8, w4a8_fp8" if memory.packed else "bf16", justify="right")
    for kind in ("dense", "moe"):
        layers = [getattr(memory, kind) for memory in inspection.memory]
        if layers[0] is None:
            continue
        table.add_row(Text("one dense layer" if kind == "dense" else "one MoE layer"), *_totals(layers))
        parts = [part for part in _PARTS if getattr(layers[0], part)] if kind == "moe" else []
        for part in parts:
            sizes = [readable(getattr(layer, part)) for layer in layers]
            table.add_row(Text(f"  {part.replace('_', ' ')}", "dim"), *sizes, style="dim")
    table.add_row(Text("all layers", "bold"), *_totals(list(inspection.memory)), style="bold")
    return table


def _totals(items: list[LayerMemory] | list[ModelMemory]) -> list[str]:
    return [readable(item.total) for item in items]


def _print_problems(console: Console, inspection: Inspection) -> None:
    problems = inspection.problems
    for kind, count in problems.counts.items():
        console.print(Text(f"{kind}: {count:,}", "bold red"))
        examples = problems.examples[kind]
        for text in examples:
            console.print(Text(f"  {text}"), soft_wrap=True)
        if count > len(examples):
            console.print(f"  and {count - len(examples):,} more")
    if problems.ok:
        what = "Nothing is missing, nothing is extra" if not inspection.absent else "The index is complete"
        console.print(Text(f"{what}: every tensor is what the config asks for.", "bold green"))


def readable(size: int) -> str:
    """Bytes in powers of 1000, three digits."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} TB"
