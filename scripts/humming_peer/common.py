"""What both programs need: the sizes of `k3jax bench`, its options, and random experts in Humming's layers.

Nothing here imports torch or humming on its own: a program says first which of them is not there.
"""

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

CASES = Path(__file__).parents[2] / "k3jax" / "bench" / "cases.py"
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


def names(text: str) -> list[str]:
    return text.split(",")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def make_parser(description: str | None, cases: ModuleType) -> argparse.ArgumentParser:
    """With the options that both programs have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--activations", type=names, default=["bfloat16", "float8e4m3"])
    parser.add_argument("--groups", type=int, default=cases.GROUPS)
    parser.add_argument("--hidden", type=int, default=cases.HIDDEN)
    parser.add_argument("--width", type=int, default=cases.WIDTH)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def start(seed: int) -> tuple[Any, dict[str, str]]:
    """torch, and the versions that belong to every figure. Exits with a line where something is missing."""
    for package in ("torch", "humming"):
        if importlib.util.find_spec(package) is None:
            sys.exit(f"{package} is not importable by {sys.executable}")
    import humming
    import torch

    if not torch.cuda.is_available():
        sys.exit("torch sees no CUDA GPU")
    versions = {"humming": getattr(humming, "__version__", "?"), "torch": torch.__version__}
    print(f"humming {versions['humming']}, torch {versions['torch']}, {torch.cuda.get_device_name()}")
    torch.manual_seed(seed)
    return torch, versions


def random_experts(torch: Any, shape: Any) -> tuple[Any, Any]:
    """Codes uint8 `[groups, N, K / 2]`, all of them, and scale bytes `[groups, N, K / 32]` over six octaves."""
    groups, n, k = shape.groups, shape.columns, shape.depth
    codes = torch.randint(0, 256, (groups, n, k // 2), dtype=torch.uint8, device="cuda")
    return codes, torch.randint(118, 124, (groups, n, k // 32), dtype=torch.uint8, device="cuda")


def dequantised(torch: Any, codes: Any, scales: Any) -> Any:
    """One expert's weights, float32 `[N, K]`."""
    values = torch.tensor([sign * value for sign in (1, -1) for value in MAGNITUDES], device=codes.device)
    nibbles = torch.stack([codes & 15, codes >> 4], -1).long()
    weights = values[nibbles].reshape(codes.shape[0], -1)
    return weights * torch.exp2(scales.float() - 127).repeat_interleave(32, -1)


def make_layer(torch: Any, shape: Any, activations: str, experts: tuple[Any, Any]) -> Any:
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
    layer.load_from_tensors({"weight": experts[0], "weight_scale": experts[1]})
    layer.transform()
    return layer
