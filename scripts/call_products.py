"""Calls the experts' products once each, on the operands of `k3jax bench`: something to put under a profiler.

ncu --clock-control none -k regex:.*grouped_matmul.* --section SpeedOfLight --section ComputeWorkloadAnalysis
    --section SchedulerStats --print-details all python scripts/call_products.py

Prints a line after each case, so that the kernels before it in the profiler's output are that case's: one for each
launch of the call.
"""

from typing import Annotated

import jax
import typer

from k3jax.bench.calls import expert_weights, make_experts, make_rows, product_call, quantized_rows
from k3jax.bench.cases import Case


def call_products(
    op: Annotated[str, typer.Option(help="Of w13 and w2, comma separated.")] = "w13,w2",
    recipe: Annotated[str, typer.Option(help="Comma separated.")] = "w4a16,w4a8_fp8",
    rows: Annotated[str, typer.Option(help="Routed rows, comma separated.")] = "128,2048,16384,65536",
    groups: Annotated[int, typer.Option(min=1, help="Experts on the device.")] = 112,
    implementation: Annotated[str, typer.Option(help="Of grouped_matmul.")] = "mosaic",
) -> None:
    """Call every product once."""
    for name in op.split(","):
        for each in recipe.split(","):
            first = Case(name, each, 1, groups)
            w = jax.block_until_ready(expert_weights(make_experts(first), first, implementation))
            for count in rows.split(","):
                case = Case(name, each, int(count), groups)
                x = quantized_rows(case, make_rows(case))
                jax.block_until_ready(product_call(case, x, w, implementation=implementation)())
                print(f"{name} {each} {count} rows", flush=True)


if __name__ == "__main__":
    typer.run(call_products)
