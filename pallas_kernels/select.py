"""Which implementation of an op runs: decided here once, for every op, and visible through `explain`.

`implementation=None` takes the first of the op's implementations below. A named one runs or raises; nothing falls back.
"""

import dataclasses
import functools
import logging

IMPLEMENTATIONS = ("reference", "xla", "triton", "mosaic")

# Fastest first. For the elementwise ops the reference formula is also what XLA does best: one fused pass.
_AVAILABLE = {
    "grouped_matmul": ("xla", "reference"),
    "situ_and_mul": ("xla", "reference"),
    "swiglu_and_mul": ("xla", "reference"),
    "quantize_mxfp8": ("xla", "reference"),
    "quantize_fp8_token": ("xla", "reference"),
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


def explain(op: str, *, implementation: str | None = None) -> Explanation:
    """The implementation that `op` would run when called with `implementation`, and why each other one would not.

    Raises:
        ValueError: no such op, or no such implementation.
        NotImplementedError: the named implementation exists but cannot run this op.
    """
    if op not in _AVAILABLE:
        raise ValueError(f"op={op!r} is not one of {', '.join(_AVAILABLE)}")
    available = _AVAILABLE[op]
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}, nor None")
    if implementation is not None and implementation not in available:
        raise NotImplementedError(
            f"{op} has no {implementation!r} kernel; pass one of {', '.join(available)}, or None to have one chosen"
        )
    chosen = implementation or available[0]
    others = {}
    for name in IMPLEMENTATIONS:
        if name not in available:
            others[name] = f"{op} has no such kernel"
        elif name != chosen:
            others[name] = f"can run; {chosen} was asked for" if implementation else f"can run; {chosen} is faster"
    return Explanation(op, chosen, others)


def choose(op: str, implementation: str | None) -> str:
    """The name `explain` gives, after one INFO log line for each new choice."""
    chosen = explain(op, implementation=implementation).chosen
    _log_once(op, chosen)
    return chosen


@functools.cache
def _log_once(op: str, chosen: str) -> None:
    logging.getLogger("pallas_kernels").info("%s runs on implementation %r", op, chosen)
