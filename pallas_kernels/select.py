"""Which implementation of an op runs: decided here once, for every op, and visible through `explain`.

`implementation=None` takes the first of the op's implementations, fastest first, that can take the operands on this
device. A named one runs or raises; nothing falls back. One that was never timed runs only where it is named.
"""

import dataclasses
import functools
import logging
from typing import Any

import jax

IMPLEMENTATIONS = ("reference", "xla", "triton", "mosaic")

# Fastest first. On Blackwell neither mosaic nor triton ever ran: for w4a16 `scripts/roofline.py` predicts mosaic to be
# the faster at any number of rows: it decodes in fewer instructions, and its tiles have any multiple of 16 rows.
_FASTEST_FIRST = {
    "grouped_matmul": ("mosaic", "triton", "xla", "reference"),
    "dense_matmul": ("mosaic", "xla", "reference"),
    "situ_and_mul": ("mosaic", "xla", "triton", "reference"),
    "swiglu_and_mul": ("mosaic", "xla", "triton", "reference"),
    "quantize_mxfp8": ("mosaic", "xla", "triton", "reference"),
    "quantize_fp8_token": ("mosaic", "xla", "triton", "reference"),
    "rms_norm": ("mosaic", "xla", "reference"),
    # xla before triton: on an H200, a decode step with jax-triton's calls in it waited for the host's launches, as if
    # XLA left them out of its CUDA graph.
    "stable_top_k": ("mosaic", "xla", "triton", "reference"),
    "top_k_weights": ("mosaic", "xla", "reference"),
    "schedule_rows": ("mosaic", "xla", "triton", "reference"),
    "spread_rows": ("mosaic", "xla", "reference"),
    "gather_rows": ("mosaic", "triton", "xla", "reference"),
    "combine_rows": ("mosaic", "xla", "triton", "reference"),
    "after": ("mosaic", "xla", "reference"),
}

# Which recipes the GPU kernels of grouped_matmul multiply, by the compute capabilities they are for: 100 is 10.0. The
# other ops have kernels for the same capabilities, except dense_matmul: Mosaic's of bfloat16 weights is its only one.
# On Blackwell w4a8 is triton's alone: its tensor cores multiply MXFP4 by e4m3, which Mosaic's operand rules have no way
# to say.
GPU_KERNELS: dict[str, dict[range, tuple[str, ...]]] = {
    "mosaic": {range(90, 91): ("w4a16", "w4a8", "w4a8_fp8"), range(100, 101): ("w4a16",)},
    "triton": {range(80, 130): ("bf16", "w4a16", "w4a8", "w4a8_fp8")},
}

# Likewise the kernels of grouped_matmul that were never timed on a GPU: they run where they are named. Hopper's of
# bfloat16 weights was timed with one group only: that is dense_matmul, for which it comes first.
UNTIMED: dict[str, dict[range, tuple[str, ...]]] = {"mosaic": {range(90, 91): ("bf16",)}}


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The choice for one op: what runs, for each other implementation why it does not, and how the chosen one runs.

    `how` names the tuning of a kernel that has several, and where it is from; None where there is none to name.
    """

    op: str
    chosen: str
    others: dict[str, str]
    how: str | None = None

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.chosen} runs" + (f": {self.how}" if self.how else "")]
        return "\n".join(lines + [f"  {name}: {reason}" for name, reason in self.others.items()])


def explain(
    op: str,
    *,
    implementation: str | None = None,
    x: Any = None,
    w: Any = None,
    activation: Any = None,
    groups: int | None = None,
    ids: Any = None,
) -> Explanation:
    """The implementation that `op` would run when called with `implementation`, and why each other one would not.

    For "grouped_matmul", `x`, `w` and `activation` are its operands; without them the answer is for MXFP4 weights in
    the layout that each implementation wants, which loading a layer gives them. "dense_matmul" has the same three;
    without them the answer is for bfloat16. The other ops have one operand, `x`; without it the answer is for bfloat16
    rows, or for few scores or slots. "schedule_rows" has `groups` too; without them the answer is for few.
    "spread_rows" has `groups` and `ids` too; without its operands the answer is for few slots, and of "xla" it tells
    nothing of the ops that it is made of.

    Raises:
        ValueError: no such op, or no such implementation.
        NotImplementedError: the named implementation cannot run this op, or these operands here.
    """
    if op not in _FASTEST_FIRST:
        raise ValueError(f"op={op!r} is not one of {', '.join(_FASTEST_FIRST)}")
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}, nor None")
    reasons = {name: _why_not(op, name, x, w, activation, groups, ids) for name in IMPLEMENTATIONS}
    able = [name for name in _FASTEST_FIRST[op] if reasons[name] is None]
    if implementation is not None and implementation not in able:
        raise NotImplementedError(
            f"{op} cannot run on implementation {implementation!r}: {reasons[implementation]}; "
            f"pass {' or '.join(able)}, or None to have one chosen"
        )
    untimed = [name for name in able if op == "grouped_matmul" and _untimed(name, _recipe(x, w))]
    free = [name for name in able if name not in untimed]
    if not free:
        details = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise NotImplementedError(f"no implementation of {op} can run these operands on this device: {details}")
    chosen = implementation or free[0]
    preferred = f"{chosen} was asked for" if implementation else f"{chosen} comes first"
    can = {name: "can run where it is named: it was never timed" if name in untimed else "can run" for name in able}
    others = {name: reason or f"{can[name]}; {preferred}" for name, reason in reasons.items() if name != chosen}
    return Explanation(op, chosen, others, _how(op, chosen, x, w, activation))


def choose(op: str, implementation: str | None, **operands: Any) -> str:
    """The name `explain` gives of these operands, after one INFO log line for each new choice."""
    chosen = explain(op, implementation=implementation, **operands).chosen
    _log_once(op, chosen)
    return chosen


def why_not_on_gpu(name: str, recipe: str | None) -> str | None:
    """Why the kernels of this name cannot run here, grouped_matmul's for `recipe` (None: any); None if they can."""
    from pallas_kernels import triton_call

    unavailable = triton_call.why_not() if name == "triton" else None
    if unavailable or (name == "triton" and triton_call.interpreted()):
        return unavailable
    capability = triton_call.capability()
    kernels = (*GPU_KERNELS[name].items(), *UNTIMED.get(name, {}).items())
    recipes = [each for known, some in kernels if capability in known for each in some]
    if not recipes:
        known = " or ".join(_spelled(some) for some in GPU_KERNELS[name])
        return f"it is written for compute capability {known}, and this is {jax.devices()[0].device_kind}"
    if recipe is not None and recipe not in recipes:
        return f"on this device it has {', '.join(recipes)}, not {recipe}"
    return None


def _untimed(name: str, recipe: str | None) -> bool:
    return any(recipe in recipes for recipes in UNTIMED.get(name, {}).values())


def _spelled(capabilities: range) -> str:
    """Compute capabilities as their vendor writes them."""
    first, last = (f"{number // 10}.{number % 10}" for number in (capabilities[0], capabilities[-1]))
    return first if first == last else f"{first} to {last}"


def _recipe(x: Any, w: Any) -> str | None:
    """The recipe that these operands are of; None where they do not tell."""
    from pallas_kernels.grouped_matmul.kernel_layout import KernelWeights
    from pallas_kernels.mxfp4 import MXFP4Array
    from pallas_kernels.mxfp8 import MXFP8Array, TokenScaledArray

    if w is not None and not isinstance(w, KernelWeights | MXFP4Array):
        return "bf16"
    if x is None or w is None:
        return None
    return "w4a8" if isinstance(x, MXFP8Array) else "w4a8_fp8" if isinstance(x, TokenScaledArray) else "w4a16"


def _why_not(op: str, name: str, x: Any, w: Any, activation: Any, groups: int | None, ids: Any) -> str | None:
    if name not in _FASTEST_FIRST[op]:
        return f"{op} has no such kernel"
    recipe = _recipe(x, w) if op == "grouped_matmul" else "bf16" if op == "dense_matmul" else None
    unfit = why_not_on_gpu(name, recipe) if name in GPU_KERNELS else None
    if unfit:
        return unfit
    # Imported here, because the kernels' own modules import this one.
    if op == "dense_matmul":
        if name != "mosaic" or x is None or w is None:
            return None
        from pallas_kernels.grouped_matmul import mosaic_hopper_dense

        return mosaic_hopper_dense.why_not_one(x, w, activation)
    if op != "grouped_matmul":
        from pallas_kernels import row_kernels

        if x is None or name not in GPU_KERNELS:
            return None
        if op == "spread_rows":
            return None if ids is None else row_kernels.spreads().why_not(x, ids, groups)
        if op in row_kernels.ORDERS:
            kernels = row_kernels.orders(op, name)
            return kernels.why_not(x) if name == "triton" else kernels.why_not(op, x, groups)
        if name == "triton":
            return None
        kernels = row_kernels.moves(name) if op in row_kernels.MOVES else row_kernels.of(name)
        return kernels.why_not(op, x)
    if w is None:
        return None
    from pallas_kernels.grouped_matmul.kernel_layout import KernelWeights
    from pallas_kernels.mxfp4 import MXFP4Array

    laid_out = isinstance(w, KernelWeights)
    if name not in GPU_KERNELS:
        return "the weights are laid out for a GPU's kernels (from_kernel_layout gives them back)" if laid_out else None
    if name == "mosaic" and isinstance(w, MXFP4Array):
        return "the weights are not in its layout (to_kernel_layout)"
    if x is None:
        return None
    from pallas_kernels.grouped_matmul import triton_gemm

    if name == "triton":
        return triton_gemm.why_not(x, w, activation)
    from pallas_kernels.grouped_matmul import mosaic

    return mosaic.here(w).why_not(x, w, activation)


def _how(op: str, chosen: str, x: Any, w: Any, activation: Any) -> str | None:
    if op not in ("grouped_matmul", "dense_matmul") or chosen != "mosaic" or x is None or w is None:
        return None
    if op == "dense_matmul":
        from pallas_kernels.grouped_matmul import mosaic_hopper_dense

        return mosaic_hopper_dense.how_one(x.shape[0], w, activation is not None)
    from pallas_kernels.grouped_matmul import mosaic

    return mosaic.here(w).how(x.shape[0], w, activation is not None)


@functools.cache
def _log_once(op: str, chosen: str) -> None:
    logging.getLogger("pallas_kernels").info("%s runs on implementation %r", op, chosen)
