"""Times Humming's MXFP4 grouped GEMM on the sizes of `k3jax bench`, which runs this with `--peers`.

    python scripts/peer_humming.py --op w13,w2 --rows 128,16384 --groups 112 --distribution uniform --json humming.json

Needs a CUDA GPU, torch and humming (humming-kernels 0.1.19 was used), and no JAX. One line a figure: microseconds by
CUDA events around each call, the L2 cache overwritten before it, the median; and microseconds between the start of the
call's first kernel and the end of its last, as a profile shows them, without what an event costs. For e4m3 rows two
figures: "from bf16" quantises them inside the timed call, "prequantised" does not.
"""

import argparse
import json
import statistics
from types import ModuleType
from typing import Any

from humming_peer.common import dequantised, load_cases, make_layer, make_parser, names, numbers, random_experts, start
from humming_peer.timer import Timer, span


def options(cases: ModuleType) -> argparse.Namespace:
    parser = make_parser(__doc__, cases)
    parser.add_argument("--op", type=names, default=["w13", "w2"])
    parser.add_argument("--rows", type=numbers, default=list(cases.ROWS))
    parser.add_argument("--distribution", type=names, default=["uniform"], help="of uniform, zipf and hot")
    return parser.parse_args()


def relative_error(torch: Any, rows: Any, result: Any, codes: Any, scales: Any) -> float:
    """Of one expert's rows, against its dequantised weights in float32."""
    expected = rows.float() @ dequantised(torch, codes, scales).T
    return float((result.float() - expected).norm() / expected.norm())


def time_case(torch: Any, timer: Timer, case: Any, activations: str, layer: Any, weights: Any) -> list[dict[str, Any]]:
    """One record, or two for e4m3 activations."""
    from humming.forward import may_quant_input

    sizes = torch.from_numpy(case.group_sizes).long()
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).cuda()
    how_to = {"expert_layout": bounds, "compute_config": {"gemm_type": "grouped_contiguous"}}
    x = torch.randn(case.rows, case.depth, device="cuda", dtype=torch.bfloat16)
    busiest = int(sizes.argmax())
    part = slice(int(bounds[busiest]), int(bounds[busiest + 1]))
    error = relative_error(torch, x[part], layer(x, **how_to)[part], *(tensor[busiest] for tensor in weights))
    calls = {"from bf16": lambda: layer(x, **how_to)}
    if activations != "bfloat16":
        quantised, scale = may_quant_input(layer.humming_config, x)
        calls["prequantised"] = lambda: layer(quantised, input_scale=scale, **how_to)
    records = []
    for how, call in calls.items():
        us, kernel_us = timer.events(call), span(timer.profile(call))
        median = statistics.median(us)
        record = {"op": case.op, "activations": activations, "how": how, "groups": case.groups, "rows": case.rows}
        record |= {"distribution": case.distribution, "us": median, "us_min": min(us), "us_max": max(us)}
        record |= {"kernel_us": kernel_us, "relative_error": error}
        record |= {"tflops": case.flop / median / 1e6, "tbs": case.weight_bytes / median / 1e6}
        kernel = "-" if kernel_us is None else f"{kernel_us:.1f}"
        print(
            f"{case.op} {activations} {how}, {case.distribution} S={case.rows}: {median:.1f} us, kernels {kernel} us, "
            f"{record['tflops']:.0f} TFLOP/s, {record['tbs']:.2f} TB/s, error {error:.1e}",
            flush=True,
        )
        records.append(record)
    return records


def main() -> None:
    cases = load_cases()
    chosen = options(cases)
    torch, versions = start(chosen.seed)
    timer, records = Timer(torch), []
    for op in chosen.op:
        sizes = {"groups": chosen.groups, "hidden": chosen.hidden, "width": chosen.width, "seed": chosen.seed}
        shape = cases.Case(op, "w4a16", 1, **sizes)
        experts = random_experts(torch, shape)
        for activations in chosen.activations:
            layer = make_layer(torch, shape, activations, experts)
            for distribution in chosen.distribution:
                for rows in chosen.rows:
                    case = cases.Case(op, "w4a16", rows, distribution=distribution, **sizes)
                    records += [
                        record | versions for record in time_case(torch, timer, case, activations, layer, experts)
                    ]
            del layer
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
