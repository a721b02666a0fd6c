"""Times the routed path out of Humming's kernels on the sizes of `k3jax bench --op layer`, which runs it for `--peers`.

    python scripts/peer_humming_layer.py --tokens 1,64,1024 --groups 112 --activations float8e4m3 --json layer.json

From ids, weights and bfloat16 latents to the bfloat16 sums, in both layouts of `humming_peer.routed`. Needs a CUDA GPU,
torch, triton and humming (humming-kernels 0.1.19 was used), and no JAX. The path is a CUDA graph at every number of
tokens, so no launch of the host is in a figure. Two lines each: microseconds of a replay by CUDA events, the L2 cache
overwritten before it, the median; those between the start of its first kernel and the end of its last, as a profile
shows them; its relative error to a plain computation in float32; then its kernels. A wrong result ends the program.
"""

import argparse
import json
import statistics
import sys
from types import ModuleType
from typing import Any

from humming_peer.common import dequantised, load_cases, make_layer, make_parser, numbers, random_experts, start
from humming_peer.timer import Timer, kernel_times, span

TOKENS = (1, 8, 64, 256, 1024, 8192)
BETAS = 4.0, 25.0  # Kimi K3's
CHECKED = 3  # tokens
# Its e4m3 products never promote their sums, which Hopper's tensor cores cut off: 1.2e-2 was seen of whole paths.
MOST_ERROR = {"bfloat16": 1e-2, "float8e4m3": 2e-2}


def options(cases: ModuleType) -> argparse.Namespace:
    parser = make_parser(__doc__, cases)
    parser.add_argument("--tokens", type=numbers, default=list(TOKENS))
    parser.add_argument("--picks", type=int, default=cases.PICKS)
    return parser.parse_args()


def plain(torch: Any, inputs: Any, experts: dict[str, Any], token: int, *, eight_bits: bool) -> Any:
    """One token's sum, float32 `[L]`: rounded where the path rounds, in float32 else."""

    def rounded(row: Any) -> Any:
        if not eight_bits:
            return row.bfloat16().float()
        scale = row.abs().max() / 448
        return (row / scale).to(torch.float8_e4m3fn).float() * scale

    row = rounded(inputs.latents[token].float())
    total = torch.zeros_like(row)
    for expert, weight in zip(inputs.ids[token].tolist(), inputs.weights[token], strict=True):
        w13, w2 = (dequantised(torch, *(tensor[expert] for tensor in experts[op])) for op in ("w13", "w2"))
        gate, up = (w13 @ row).bfloat16().float().chunk(2)
        gate = BETAS[0] * torch.tanh(gate / BETAS[0]) * torch.sigmoid(gate)
        hidden = rounded(gate * BETAS[1] * torch.tanh(up / BETAS[1]))
        total += weight * (w2 @ hidden).bfloat16().float()
    return total


def relative_error(torch: Any, inputs: Any, sums: Any, experts: dict[str, Any], *, eight_bits: bool) -> float:
    """Of the first tokens and the last."""
    tokens = len(sums)
    checked = sorted({*range(min(tokens, CHECKED - 1)), tokens - 1})
    expected = torch.stack([plain(torch, inputs, experts, token, eight_bits=eight_bits) for token in checked])
    return float((sums[checked].float() - expected).norm() / expected.norm())


def make_inputs(torch: Any, cases: ModuleType, chosen: argparse.Namespace, tokens: int) -> Any:
    """Unit-normal latents, picks spread evenly, and weights that sum to 1."""
    from humming_peer.routed import Inputs

    ids = cases.even_picks(tokens, chosen.picks, chosen.groups, chosen.seed)
    weights = torch.rand(tokens, chosen.picks, device="cuda") + 0.1
    latents = torch.randn(tokens, chosen.hidden, device="cuda", dtype=torch.bfloat16)
    return Inputs(latents, torch.from_numpy(ids).cuda(), weights / weights.sum(1, keepdim=True))


def time_path(
    torch: Any, timer: Timer, path: Any, inputs: Any, experts: dict[str, Any], activations: str
) -> dict[str, Any]:
    """The figures of one path; exits if its result is wrong."""
    from humming_peer.routed import Captured

    what = f"{activations}, {path.layout}, T={len(inputs.latents)}"
    graph = Captured(path.call(inputs))
    graph.replay()
    error = relative_error(torch, inputs, graph.sums, experts, eight_bits=activations != "bfloat16")
    if not error <= MOST_ERROR[activations]:
        allowed = MOST_ERROR[activations]
        sys.exit(f"{what}: the result is wrong, relative L2 {error:.1e} where {allowed:g} is allowed")
    us, calls = timer.events(graph.replay), timer.profile(graph.replay)
    kernel_us, kernels = span(calls), kernel_times(calls)
    shown = "-" if kernel_us is None else f"{kernel_us:.1f}"
    print(f"{what}: {statistics.median(us):.1f} us, kernels {shown} us, error {error:.1e}")
    print(
        "    " + ", ".join(f"{name.split('<')[0].split('(')[0][-40:]} {time:.1f}" for name, time in kernels), flush=True
    )
    record = {"us": statistics.median(us), "us_min": min(us), "us_max": max(us), "kernel_us": kernel_us}
    return record | {"relative_error": error, "kernels": kernels}


def main() -> None:
    cases = load_cases()
    chosen = options(cases)
    torch, versions = start(chosen.seed)
    from humming_peer.routed import LAYOUTS, RoutedPath

    sizes = {"groups": chosen.groups, "hidden": chosen.hidden, "width": chosen.width, "seed": chosen.seed}
    shapes = {op: cases.Case(op, "w4a16", 1, **sizes) for op in cases.GEMMS}
    experts = {op: random_experts(torch, shape) for op, shape in shapes.items()}
    timer, records = Timer(torch), []
    for activations in chosen.activations:
        layers = {op: make_layer(torch, shape, activations, experts[op]) for op, shape in shapes.items()}
        for layout in LAYOUTS:
            path = RoutedPath(layers, layout, [tokens * chosen.picks for tokens in chosen.tokens], BETAS)
            for tokens in chosen.tokens:
                inputs = make_inputs(torch, cases, chosen, tokens)
                figures = time_path(torch, timer, path, inputs, experts, activations)
                record = {"activations": activations, "layout": layout, "tokens": tokens, "picks": chosen.picks}
                records.append(record | sizes | figures | versions)
        del layers, path
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
