"""Which implementation of an op runs: decided here once, for every op, and visible through `explain`.

`implementation=None` takes the first of the op's implementations, fastest first, that can take the operands on this
device. A named one runs or raises; nothing falls back.
"""

import dataclasses
import functools
import logging
from typing import Any

import jax

IMPLEMENTATIONS = ("reference", "xla", "triton", "mosaic")

# Fastest first.
_FASTEST_FIRST = {
    "grouped_matmul": ("mosaic", "xla", "reference"),
    "situ_and_mul": ("mosaic", "xla", "reference"),
    "swiglu_and_mul": ("mosaic", "xla", "reference"),
    "quantize_mxfp8": ("mosaic", "xla", "reference"),
    "quantize_fp8_token": ("mosaic", "xla", "reference"),
}


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The choice for one op: what runs, and for each other implementation why it does not."""

    op: str
    chosen: str
    others: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.chosen} runs"]
        return "\n".join(lines + [f"  {name}: {reason}" for name, reason in self.others.items()])


def explain(
    op: str, *, implementation: str | None = None, x: Any = None, w: Any = None, activation: Any = None
) -> Explanation:
    """The implementation that `op` would run when called with `implementation`, and why each other one would not.

    For "grouped_matmul", `x`, `w` and `activation` are its operands; without them the answer is for MXFP4 weights in
    the layout that each implementation wants, which loading a layer gives them. The other ops have one operand, `x`;
    without it the answer is for bfloat16 rows.

    Raises:
        ValueError: no such op, or no such implementation.
        NotImplementedError: the named implementation cannot run this op, or these operands here.
    """
    if op not in _FASTEST_FIRST:
        raise ValueError(f"op={op!r} is not one of {', '.join(_FASTEST_FIRST)}")
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}, nor None")
    reasons = {name: _why_not(op, name, x, w, activation) for name in IMPLEMENTATIONS}
    able = [name for name in _FASTEST_FIRST[op] if reasons[name] is None]
    if implementation is not None and implementation not in able:
        raise NotImplementedError(
            f"{op} cannot run on implementation {implementation!r}: {reasons[implementation]}; "
            f"pass {' or '.join(able)}, or None to have one chosen"
        )
    if not able:
        details = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise NotImplementedError(f"no implementation of {op} can run these operands on this device: {details}")
    chosen = implementation or able[0]
    preferred = f"{chosen} was asked for" if implementation else f"{chosen} is faster"
    others = {name: reason or f"can run; {preferred}" for name, reason in reasons.items() if name != chosen}
    return Explanation(op, chosen, others)


def choose(op: str, implementation: str | None, *, x: Any = None, w: Any = None, activation: Any = None) -> str:
    """The name `explain` gives, after one INFO log line for each new choice."""
    chosen = explain(op, implementation=implementation, x=x, w=w, activation=activation).chosen
    _log_once(op, chosen)
    return chosen


def why_not_hopper() -> str | None:
    """Why this device cannot run the kernels for sm_90a; None if it can."""
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    if capability == "9.0":
        return None
    return f"it is written for Hopper (compute capability 9.0), and this is {device.device_kind}"


def _why_not(op: str, name: str, x: Any, w: Any, activation: Any) -> str | None:
    if name not in _FASTEST_FIRST[op]:
        return f"{op} has no such kernel"
    unfit = why_not_hopper() if name == "mosaic" else None
    if unfit:
        return unfit
    # Imported here, because the kernels' own modules import this one.
    if op != "grouped_matmul":
        if name != "mosaic" or x is None:
            return None
        from pallas_kernels.row_kernels import mosaic_hopper as row_kernels

        return row_kernels.why_not(op, x)
    if w is None:
        return None
    from pallas_kernels.grouped_matmul.kernel_layout import KernelWeights

    if not isinstance(w, KernelWeights):
        return "the weights are not in its layout (to_kernel_layout)" if name == "mosaic" else None
    if name != "mosaic":
        return "the weights are laid out for mosaic (from_kernel_layout gives them back)"
    from pallas_kernels.grouped_matmul import mosaic_hopper

    return None if x is None else mosaic_hopper.why_not(x, w, activation)


@functools.cache
def _log_once(op: str, chosen: str) -> None:
    logging.getLogger("pallas_kernels").info("%s runs on implementation %r", op, chosen)
