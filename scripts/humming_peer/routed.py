"""The routed path out of Humming's kernels: from ids, weights and latents to the sums, as vLLM assembles it.

Two ways of it, which vLLM has as well: its own choice is the first.

    indexed:            ids -> blocks of slots; w13 gathers the tokens' rows itself, and everything after is in the
                        order of slots
    grouped_contiguous: ids -> a row for each slot; Humming's `process_input` spreads the tokens over the rows, the
                        products take contiguous rows, and the sum gathers

For e4m3 activations a token is quantised once, before it is spread; SiTU and the quantisation of its result are one
kernel of Humming's.
"""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import torch
from humming.forward import may_process_input
from humming.tune import get_heuristics_config

from humming_peer.kernels import Schedule, combine

LAYOUTS = ("indexed", "grouped_contiguous")

# C++, of a gate `a` and an up `b`. tanh(z) = 1 - 2 / (1 + exp(2z)): with the fast exponential it stays bound by memory.
SITU = """[](float a, float b) {{
    const float gate = {beta}f * (1.f - __fdividef(2.f, 1.f + __expf(a * (2.f / {beta}f))));
    const float up = {linear_beta}f * (1.f - __fdividef(2.f, 1.f + __expf(b * (2.f / {linear_beta}f))));
    return __fdividef(gate, 1.f + __expf(-a)) * up;
}}(a, b)"""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Latents bfloat16 `[T, L]`, expert ids int32 `[T, X]`, and weights float32 `[T, X]`."""

    latents: Any
    ids: Any
    weights: Any


class RoutedPath:
    """The path of `layers`, Humming's for "w13" and "w2", in one layout."""

    def __init__(self, layers: dict[str, Any], layout: str, rows: list[int], betas: tuple[float, float]) -> None:
        """`rows` are all numbers of routed rows that will come: their kernels are compiled together."""
        self.layers, self.layout = layers, layout
        self.situ = SITU.format(beta=betas[0], linear_beta=betas[1])
        self._compute = json.dumps({"gemm_type": layout})
        self._tuning = {op: _tuning(layer, layout, rows) for op, layer in layers.items()}

    def call(self, inputs: Inputs) -> Callable[[], Any]:
        """Computes bfloat16 sums `[T, L]` of what is in `inputs` by then."""
        return self._indexed(inputs) if self.layout == "indexed" else self._grouped(inputs)

    def _indexed(self, inputs: Inputs) -> Callable[[], Any]:
        groups, (_, picks) = self.layers["w13"].num_experts, inputs.ids.shape
        sums = torch.empty_like(inputs.latents)
        blocks = {op: self._block(op, inputs.ids.numel()) for op in self.layers}
        schedules = {block: Schedule(inputs.ids, groups, block) for block in blocks.values()}

        def product(op: str, rows: Any, scale: Any, picks: int) -> Any:
            one = schedules[blocks[op]]
            where = {"sorted_ids": one.slot, "expert_ids": one.experts, "num_tokens_padded": one.padded}
            return self._product(op, rows, scale, top_k=picks, **where)

        def call() -> Any:
            for schedule in schedules.values():
                schedule.fill()
            gate_up = product("w13", *self._processed("w13", inputs.latents), picks)
            rows = product("w2", *self._activated(gate_up), 1)
            combine(rows, inputs.ids, inputs.weights, sums, in_expert_order=False)
            return sums

        return call

    def _grouped(self, inputs: Inputs) -> Callable[[], Any]:
        schedule = Schedule(inputs.ids, self.layers["w13"].num_experts)
        sums = torch.empty_like(inputs.latents)

        def call() -> Any:
            schedule.fill()
            spread = self._processed("w13", inputs.latents, layout="scatter", scatter_idx=schedule.row)
            gate_up = self._product("w13", *spread, expert_layout=schedule.bounds)
            rows = self._product("w2", *self._activated(gate_up), expert_layout=schedule.bounds)
            combine(rows, schedule.row, inputs.weights, sums, in_expert_order=True)
            return sums

        return call

    def _activated(self, gate_up: Any) -> tuple[Any, Any]:
        return self._processed("w2", gate_up, activation_type="binary_split", activation_impl=self.situ)

    def _processed(self, op: str, rows: Any, **how: Any) -> tuple[Any, Any]:
        """Rows for `op`, and their scales if its activations have any."""
        made, _, scales = may_process_input(self.layers[op].humming_config, rows, **how)
        return made, scales

    def _product(self, op: str, rows: Any, scale: Any, **where: Any) -> Any:
        how = {"compute_config": self._compute, "tuning_config": json.dumps(self._tuning[op])}
        return self.layers[op](rows, input_scale=scale, **where, **how)

    def _block(self, op: str, rows: int) -> int:
        """Rows of a block of the product."""
        (block,) = [config["block_shape"][0] for below, most, config in self._tuning[op] if below < rows <= most]
        return block


class Captured:
    """A path as a CUDA graph. It keeps `call` too, whose buffers the graph goes on reading and writing.

    Attributes:
        sums: what each replay writes.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what is not compiled yet is not to be captured
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.sums = call()

    def replay(self) -> None:
        self._graph.replay()


def _tuning(layer: Any, layout: str, rows: list[int]) -> list[Any]:
    """Humming's own choice for each number of rows, as intervals: over the one, up to the other."""
    distinct = sorted(set(rows))
    below = [0, *distinct[:-1]]
    most = [*distinct[:-1], 1 << 30]
    chosen = [get_heuristics_config(layer.humming_config, shape_m=count, gemm_type=layout) for count in distinct]
    return [list(interval) for interval in zip(below, most, chosen, strict=True)]
