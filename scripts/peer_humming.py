"""Times Humming's MXFP4 grouped GEMM on the sizes of `k3jax bench`, which runs this with `--peers`.

    python scripts/peer_humming.py --op w13,w2 --rows 128,16384 --groups 112 --distribution uniform --json humming.json

Needs a CUDA GPU, torch and humming (humming-kernels 0.1.19 was used), and no JAX. One line a figure: microseconds by
CUDA events around each call, the L2 cache overwritten before it, the median; and microseconds between the start of the
call's first kernel and the end of its last, as a profile shows them, without what an event costs. For e4m3 rows two
figures: "from bf16" quantises them inside the timed call, "prequantised" does not.
"""

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

CASES = Path(__file__).parents[1] / "k3jax" / "bench" / "cases.py"
FLUSH_BYTES = 256 << 20
WARM_UP_MS, TIMED_MS, PROFILED_CALLS = 50, 200, 20
MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def load_cases() -> ModuleType:
    """`k3jax/bench/cases.py` without its package, which needs JAX."""
    spec = importlib.util.spec_from_file_location("bench_cases", CASES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def options(cases: ModuleType) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", type=names, default=["w13", "w2"])
    parser.add_argument("--rows", type=numbers, default=list(cases.ROWS))
    parser.add_argument("--distribution", type=names, default=["uniform"], help="of uniform, zipf and hot")
    parser.add_argument("--activations", type=names, default=["bfloat16", "float8e4m3"])
    parser.add_argument("--groups", type=int, default=cases.GROUPS)
    parser.add_argument("--hidden", type=int, default=cases.HIDDEN)
    parser.add_argument("--width", type=int, default=cases.WIDTH)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


class Timer:
    """Times calls on the current CUDA stream, each after a write of `FLUSH_BYTES`."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.cache = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def events(self, call: Callable[[], Any]) -> list[float]:
        """Microseconds of each call, by events: calls for about `TIMED_MS`, after about `WARM_UP_MS` more."""
        estimate = statistics.median(self._events(call, 5))
        self._events(call, max(1, int(WARM_UP_MS / estimate)))
        return [1e3 * ms for ms in self._events(call, max(10, int(TIMED_MS / estimate)))]

    def kernels(self, call: Callable[[], Any]) -> list[float] | None:
        """Microseconds from each call's first kernel to its last one's end; None if the profile can't be divided."""
        profiler = self.torch.profiler
        self._events(call, PROFILED_CALLS)
        with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(PROFILED_CALLS):
                self.cache.zero_()
                call()
            self.torch.cuda.synchronize()
        cuda = self.torch.autograd.DeviceType.CUDA
        ranges = sorted(
            (event.time_range.start, event.time_range.end) for event in profile.events() if event.device_type == cuda
        )
        each, left = divmod(len(ranges), PROFILED_CALLS)
        if left or each < 2:
            return None
        calls = [ranges[index + 1 : index + each] for index in range(0, len(ranges), each)]  # without the write
        return [max(end for _, end in call) - call[0][0] for call in calls]

    def _events(self, call: Callable[[], Any], count: int) -> list[float]:
        event = self.torch.cuda.Event
        pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(count)]
        for start, stop in pairs:
            self.cache.zero_()
            start.record()
            call()
            stop.record()
        self.torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in pairs]


def relative_error(torch: Any, rows: Any, result: Any, codes: Any, scales: Any) -> float:
    """Of one expert's rows, against its dequantised weights in float32."""
    values = torch.tensor([sign * value for sign in (1, -1) for value in MAGNITUDES], device="cuda")
    nibbles = torch.stack([codes & 15, codes >> 4], -1).long()
    weights = values[nibbles].reshape(codes.shape[0], -1)
    weights = weights * torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
    expected = rows.float() @ weights.T
    return float((result.float() - expected).norm() / expected.norm())


def make_layer(torch: Any, shape: Any, activations: str, codes: Any, scales: Any) -> Any:
    """Humming's layer of all experts, its weights in its own order."""
    from humming.layer import HummingLayer

    layer = HummingLayer(
        shape_n=shape.columns,
        shape_k=shape.depth,
        weight_config={"quant_method": "mxfp4"},
        input_config=None if activations == "bfloat16" else {"dtype": activations},
        num_experts=shape.groups,
        torch_dtype=torch.bfloat16,
    ).cuda()
    layer.load_from_tensors({"weight": codes, "weight_scale": scales})
    layer.transform()
    return layer


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
    versions = {"humming": getattr(sys.modules["humming"], "__version__", "?"), "torch": torch.__version__}
    for how, call in calls.items():
        us, kernel_us = timer.events(call), timer.kernels(call)
        median = statistics.median(us)
        record = {"op": case.op, "activations": activations, "how": how, "groups": case.groups, "rows": case.rows}
        record |= {"distribution": case.distribution, "us": median, "us_min": min(us), "us_max": max(us)}
        record |= {"kernel_us": None if kernel_us is None else statistics.median(kernel_us), "relative_error": error}
        record |= versions
        record |= {"tflops": case.flop / median / 1e6, "tbs": case.weight_bytes / median / 1e6}
        kernel = "-" if kernel_us is None else f"{record['kernel_us']:.1f}"
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
    for package in ("torch", "humming"):
        if importlib.util.find_spec(package) is None:
            sys.exit(f"{package} is not importable by {sys.executable}")
    import humming
    import torch

    if not torch.cuda.is_available():
        sys.exit("torch sees no CUDA GPU")
    print(f"humming {getattr(humming, '__version__', '?')}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
    torch.manual_seed(chosen.seed)
    timer, records = Timer(torch), []
    for op in chosen.op:
        sizes = {"groups": chosen.groups, "hidden": chosen.hidden, "width": chosen.width, "seed": chosen.seed}
        shape = cases.Case(op, "w4a16", 1, **sizes)
        n, k = shape.columns, shape.depth
        codes = torch.randint(0, 256, (chosen.groups, n, k // 2), dtype=torch.uint8, device="cuda")
        scales = torch.randint(118, 124, (chosen.groups, n, k // 32), dtype=torch.uint8, device="cuda")
        for activations in chosen.activations:
            layer = make_layer(torch, shape, activations, codes, scales)
            for distribution in chosen.distribution:
                for rows in chosen.rows:
                    case = cases.Case(op, "w4a16", rows, distribution=distribution, **sizes)
                    records += time_case(torch, timer, case, activations, layer, (codes, scales))
            del layer
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
