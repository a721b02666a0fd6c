# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = ["torch==2.13.0", "numpy", "safetensors"]
# ///
"""Run Kimi K3's MLP and mixture-of-experts layers in PyTorch and keep what goes through them, for `k3jax compare`.

    python scripts/capture_torch.py CHECKPOINT OUT.safetensors --layers 0,1 --tokens 24 --seed 0
    python scripts/capture_torch.py CHECKPOINT OUT.safetensors --layers 1 --gradients

A program of its own: it imports nothing of k3jax and k3jax imports nothing of it. It runs on Python 3.11, where the
pinned PyTorch is a small CPU build. The layers below are bfloat16 modules with the official model's rounding points:
every Linear accumulates in float32 and rounds once, the activation is computed in float32 and rounded, the experts'
outputs are weighted and summed in float32. Experts are expanded from MXFP4 to bfloat16 one at a time, as they are used.

To capture from another engine, take `capture_with_hooks` and `write_capture` from here: the first hooks modules that
exist already, the second writes the file that docs/captures.md describes. `TAPS` shows what a name map looks like.

With `--gradients` the file holds gradients instead: of sum(layer(x) * out) for a random `out`, with respect to x and
to every weight but the experts', in bfloat16 and once more with everything in float32.
"""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float32)


class Tap(NamedTuple):
    """Where a stage can be heard: a module's output, or its first input; `index` where that is a tuple."""

    module: str
    index: int | None = None
    of_input: bool = False


TAPS = {
    "dense": {"output": Tap("")},
    "moe": {
        "router_logits": Tap("gate", 0),
        "expert_ids": Tap("gate", 1),
        "expert_weights": Tap("gate", 2),
        "latent": Tap("routed_expert_down_proj"),
        "expert_sum": Tap("experts"),
        "normed_latent": Tap("routed_expert_norm"),
        "shared": Tap("shared_experts"),
        "output": Tap(""),
    },
}
"""Stage -> where to hear it, by the module names of the official model; "" is the whole layer."""


def capture_with_hooks(layer: nn.Module, x: Tensor, taps: dict[str, Tap]) -> dict[str, Tensor]:
    """Run `layer(x)` once, x [T, D], and return its input and what each tap heard, flattened to [T, ...].

    Taps on modules that the layer lacks are left out: a capture may be partial.
    """
    heard: dict[str, Tensor] = {"input": x}
    modules = dict(layer.named_modules())

    def listener(stage: str, tap: Tap) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            value = inputs[0] if tap.of_input else output
            value = value if tap.index is None else value[tap.index]
            heard[stage] = value.detach().reshape(-1, value.shape[-1]).clone()

        return hook

    present = {stage: tap for stage, tap in taps.items() if tap.module in modules}
    handles = [modules[tap.module].register_forward_hook(listener(stage, tap)) for stage, tap in present.items()]
    try:
        with torch.no_grad():
            layer(x)
    finally:
        for handle in handles:
            handle.remove()
    return heard


def write_capture(
    path: Path, layers: dict[int, dict[str, Tensor]], *, engine: str, recipe: str, rounding_order: str
) -> None:
    """Write {layer: {stage: tensor}} as a capture; `rounding_order` "official" promises the order named above."""
    tensors = {
        f"layers.{layer}.{stage}": (value.to(torch.int32) if stage == "expert_ids" else value).contiguous().cpu()
        for layer, stages in layers.items()
        for stage, value in stages.items()
    }
    metadata = {
        "format": "k3jax-capture-1",
        "engine": engine,
        "recipe": recipe,
        "rounding_order": rounding_order,
    }
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial, metadata)
    partial.replace(path)


class Checkpoint:
    """A checkpoint folder: its text config, and its tensors by layer and the name that follows `layers.N.`."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dtype = dtype
        config = json.loads((folder / "config.json").read_text())
        self.config: dict[str, Any] = config.get("text_config", config)
        self._where: dict[tuple[int, str], tuple[Path, str]] = {}
        for shard in sorted(folder.glob("*.safetensors")):
            with safe_open(shard, framework="pt") as file:
                for full_name in file.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                    if match := re.search(r"(?:^|\.)layers\.(\d+)\.(.+)$", full_name):
                        self._where[int(match[1]), match[2]] = (shard, full_name)

    def has(self, layer: int, name: str) -> bool:
        return (layer, name) in self._where

    def read(self, layer: int, name: str) -> Tensor:
        if not self.has(layer, name):
            raise SystemExit(f"the checkpoint has no tensor {name} in layer {layer}")
        shard, full_name = self._where[layer, name]
        with safe_open(shard, framework="pt") as file:
            return file.get_tensor(full_name)

    def weight(self, layer: int, name: str) -> Tensor:
        """A matrix [out, in] in `dtype`, plain or packed; what it holds is bfloat16 in either case."""
        if self.has(layer, f"{name}.weight"):
            return self.read(layer, f"{name}.weight").to(torch.bfloat16).to(self.dtype)
        packed, scale = (self.read(layer, f"{name}.weight_{part}") for part in ("packed", "scale"))
        return expand_mxfp4(packed, scale).to(self.dtype)


def expand_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """[N, K/2] uint8 codes (low nibble first) and [N, K/32] uint8 scales -> [N, K] bfloat16: code * 2^(scale - 127)."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
    powers = torch.pow(2.0, scale.double() - 127).masked_fill(scale == 255, torch.nan)
    blocks = E2M1[codes.long()].double().unflatten(1, (-1, 32)) * powers[..., None]
    return blocks.flatten(1).to(torch.bfloat16)


class Situ(nn.Module):
    """SiTU of gate and up, in float32, rounded once."""

    def __init__(self, beta: float, linear_beta: float | None) -> None:
        super().__init__()
        self.beta, self.linear_beta = beta, linear_beta

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        g, u = gate.float(), up.float()
        if self.linear_beta is not None:
            u = self.linear_beta * torch.tanh(u / self.linear_beta)
        return (self.beta * torch.tanh(g / self.beta) * torch.sigmoid(g) * u).to(gate.dtype)


class SwiGLU(nn.Module):
    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return (functional.silu(gate.float()) * up.float()).to(gate.dtype)


def linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


class GatedMLP(nn.Module):
    def __init__(self, gate: Tensor, up: Tensor, down: Tensor, activation: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(gate), linear(up), linear(down)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x), self.up_proj(x)))


class Router(nn.Module):
    """Float32 logits; biased scores choose, unbiased scores weigh. A tie goes to the lowest expert id."""

    def __init__(self, weight: Tensor, bias: Tensor, config: dict[str, Any]) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight, requires_grad=False), nn.Parameter(bias, requires_grad=False)
        self.top_k = config["num_experts_per_token"]
        self.softmax = config.get("moe_router_activation_func", "sigmoid") == "softmax"
        self.renormalize = config.get("moe_renormalize", True) and self.top_k > 1
        self.scaling = config.get("routed_scaling_factor", 1.0)
        self.groups, self.kept_groups = config.get("num_expert_group", 1), config.get("topk_group", 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = functional.linear(x.float(), self.weight.float())
        scores = logits.softmax(-1) if self.softmax else logits.sigmoid()
        biased = scores + self.bias.float()
        if self.groups > max(1, self.kept_groups):
            grouped = biased.unflatten(-1, (self.groups, -1))
            best = best_ids(grouped.topk(2, dim=-1).values.sum(-1), self.kept_groups)
            stays = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter_(1, best, True)
            biased = grouped.masked_fill(~stays[..., None], -torch.inf).flatten(1)
        ids = best_ids(biased, self.top_k)
        weights = scores.gather(-1, ids)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, ids, weights * self.scaling


def best_ids(scores: Tensor, count: int) -> Tensor:
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


class Experts(nn.Module):
    """sum_k weight_k * expert_k(x): outputs in bfloat16, weighted and summed in float32, rounded once."""

    def __init__(self, load_expert: Callable[[int], GatedMLP]) -> None:
        super().__init__()
        self.load_expert = load_expert

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        outputs = x.new_zeros(*ids.shape, x.shape[-1])
        for expert in ids.unique().tolist():
            token, pick = (ids == expert).nonzero(as_tuple=True)
            outputs[token, pick] = self.load_expert(expert)(x[token])
        return (outputs.float() * weights[..., None]).sum(1).to(x.dtype)


class RMSNorm(nn.Module):
    """The gain multiplies after the quotient is rounded."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight, requires_grad=False), eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return self.weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class MoE(nn.Module):
    """The mixture-of-experts layer; its latent, norm and shared experts are there if the checkpoint has them."""

    def __init__(self, checkpoint: Checkpoint, layer: int, activation: nn.Module) -> None:
        super().__init__()
        prefix = "block_sparse_moe"

        def gated(name: str, parts: tuple[str, str, str]) -> GatedMLP:
            return GatedMLP(*(checkpoint.weight(layer, f"{prefix}.{name}.{part}") for part in parts), activation)

        def has(name: str) -> bool:
            return checkpoint.has(layer, f"{prefix}.{name}.weight")

        gate = checkpoint.weight(layer, f"{prefix}.gate")
        bias = checkpoint.read(layer, f"{prefix}.gate.e_score_correction_bias")
        self.gate = Router(gate, bias, checkpoint.config)
        self.experts = Experts(lambda expert: gated(f"experts.{expert}", ("w1", "w3", "w2")))
        for name in ("routed_expert_down_proj", "routed_expert_up_proj"):
            if has(name):
                self.add_module(name, linear(checkpoint.weight(layer, f"{prefix}.{name}")))
        if has("routed_expert_norm"):
            gain = checkpoint.weight(layer, f"{prefix}.routed_expert_norm")
            self.routed_expert_norm = RMSNorm(gain, checkpoint.config.get("rms_norm_eps", 1e-6))
        if has("shared_experts.gate_proj"):
            self.shared_experts = gated("shared_experts", ("gate_proj", "up_proj", "down_proj"))

    def forward(self, x: Tensor) -> Tensor:
        parts = dict(self.named_children())
        _, ids, weights = self.gate(x)
        y = parts["routed_expert_down_proj"](x) if "routed_expert_down_proj" in parts else x
        y = self.experts(y, ids, weights)
        for name in ("routed_expert_norm", "routed_expert_up_proj"):
            y = parts[name](y) if name in parts else y
        return y + parts["shared_experts"](x) if "shared_experts" in parts else y


def read_activation(config: dict[str, Any]) -> nn.Module:
    if config.get("hidden_act") == "situ":
        return Situ(config["activation_situ_beta"], config["activation_situ_linear_beta"])
    if config.get("hidden_act") == "silu":
        return SwiGLU()
    raise SystemExit(f'hidden_act must be "situ" or "silu": the config has {config.get("hidden_act")!r}')


def read_layer(checkpoint: Checkpoint, layer: int) -> tuple[nn.Module, dict[str, Tap]]:
    activation = read_activation(checkpoint.config)
    if checkpoint.has(layer, "block_sparse_moe.gate.weight"):
        return MoE(checkpoint, layer, activation), TAPS["moe"]
    gate, up, down = (checkpoint.weight(layer, f"mlp.{part}_proj") for part in ("gate", "up", "down"))
    return GatedMLP(gate, up, down, activation), TAPS["dense"]


def tokens(count: int, hidden: int, seed: int, layer: int) -> Tensor:
    """Unit-normal tokens [count, hidden] in bfloat16, the same for a layer whichever others are captured with it."""
    generator = torch.Generator().manual_seed(1000 * seed + layer)
    return torch.randn(count, hidden, generator=generator).to(torch.bfloat16)


def capture_gradients(layer: nn.Module, x: Tensor, out: Tensor) -> dict[str, Tensor]:
    """d sum(layer(x) * out) / dx as "x", and by each parameter's name; the experts' and the router's bias have none."""
    parameters = {name: value for name, value in layer.named_parameters() if name != "gate.bias"}
    leaves = {"x": x.clone(), **parameters}
    for leaf in leaves.values():
        leaf.requires_grad_(True)
    loss = (layer(leaves["x"]).float() * out.float()).sum()
    found = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def write_gradients(path: Path, folder: Path, layers: list[int], count: int, seed: int) -> None:
    """`N.x` and `N.out`, and `N.DTYPE.NAME` with the gradient of each name, for every layer N and both dtypes."""
    tensors: dict[str, Tensor] = {}
    for number in layers:
        for dtype in (torch.bfloat16, torch.float32):
            checkpoint = Checkpoint(folder, dtype)
            layer, _ = read_layer(checkpoint, number)
            hidden = checkpoint.config["hidden_size"]
            x, out = (tokens(count, hidden, each, number) for each in (seed, seed + 1))
            tensors |= {f"{number}.x": x, f"{number}.out": out}
            for name, gradient in capture_gradients(layer, x.to(dtype), out.to(dtype)).items():
                tensors[f"{number}.{str(dtype).removeprefix('torch.')}.{name}"] = gradient.contiguous()
            print(f"layer {number}: gradients in {dtype}", flush=True)
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial, {"format": "k3jax-gradients-1", "engine": f"pytorch {torch.__version__}"})
    partial.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Capture layers of a Kimi K3 checkpoint from PyTorch in bfloat16.")
    parser.add_argument("checkpoint", type=Path, help="folder with config.json and the shards")
    parser.add_argument("out", type=Path, help="the capture to write, *.safetensors")
    parser.add_argument("--layers", default="0,1", help="layer numbers, separated by commas (default 0,1)")
    parser.add_argument("--tokens", type=int, default=24, help="tokens per layer (default 24)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the tokens (default 0)")
    parser.add_argument("--gradients", action="store_true", help="write gradients instead of stages")
    arguments = parser.parse_args()

    torch.set_num_threads(1)  # one order of summation, whatever the machine
    torch.use_deterministic_algorithms(True)
    numbers = [int(part) for part in arguments.layers.split(",")]
    if arguments.gradients:
        write_gradients(arguments.out, arguments.checkpoint, numbers, arguments.tokens, arguments.seed)
        return
    checkpoint = Checkpoint(arguments.checkpoint)
    captured = {}
    for number in numbers:
        layer, taps = read_layer(checkpoint, number)
        x = tokens(arguments.tokens, checkpoint.config["hidden_size"], arguments.seed, number)
        captured[number] = capture_with_hooks(layer, x, taps)
        print(f"layer {number}: {', '.join(captured[number])}", flush=True)
    engine = f"pytorch {torch.__version__}"
    write_capture(arguments.out, captured, engine=engine, recipe="bf16", rounding_order="official")


if __name__ == "__main__":
    main()
