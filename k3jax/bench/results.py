"""One case's figures as `k3jax bench` prints and writes them, for every op but the layer."""

import dataclasses
from typing import Any

from k3jax.bench.cases import RATES, Case
from k3jax.bench.dense_cases import DenseCase
from k3jax.bench.timing import Timing

ERROR_LIMITS = {"bf16": 2e-3, "w4a16": 2e-3, "w4a8": 3e-3, "w4a8_fp8": 3e-3}  # relative L2
_SIZES = {Case: ("hidden", "width"), DenseCase: ("model", "hidden", "width", "shared", "intermediate")}


@dataclasses.dataclass(frozen=True)
class Result:
    """One case's figures; microseconds are medians, None is what was not timed.

    Attributes:
        tbs: TB/s of the weights that have rows; of all bytes, where there are no weights.
        roof_us: no version can be faster, by the ceilings of this run.
        error: relative L2 of some rows against the recipe's product in float32.
        from_bf16_us: the same op with the quantisation of its rows inside.
        quantized_out_us: the same op with its result quantised for the next product.
        xla_us: the `xla` implementation on the same rows.
        dot_us: of a dense product, `jnp.dot` on the same operands, without the activation.
        compile_s: seconds that compiling the op took.
        peers: others' figures, by their name in the JSON; empty where none were asked for.
    """

    case: Case | DenseCase
    implementation: str
    timing: Timing
    roof_us: float
    compile_s: float
    error: float | None = None
    from_bf16_us: float | None = None
    quantized_out_us: float | None = None
    xla_us: float | None = None
    dot_us: float | None = None
    peers: dict[str, float | None] = dataclasses.field(default_factory=dict)

    @property
    def tflops(self) -> float | None:
        return self.case.flop / self.timing.us / 1e6 if self.case.flop else None

    @property
    def tbs(self) -> float:
        return (self.case.weight_bytes or self.case.bytes) / self.timing.us / 1e6

    @property
    def ok(self) -> bool:
        """Whether what was timed is also right."""
        return self.error is None or self.error <= ERROR_LIMITS[self.case.recipe]

    def flat(self) -> dict[str, Any]:
        """As an object of the JSON."""
        case = self.case
        return {
            "op": case.op,
            "recipe": case.recipe,
            "implementation": self.implementation,
            "groups": case.groups,
            "rows": case.rows,
            "distribution": case.distribution,
            **{name: getattr(self.timing, name) for name in ("us", "us_min", "us_max")},
            **{name: getattr(self, name) for name in ("tflops", "tbs", "roof_us", "error")},
            **{name: getattr(self, name) for name in ("from_bf16_us", "quantized_out_us", "xla_us", "dot_us")},
            "compile_s": self.compile_s,
            "timer": self.timing.timer,
            **{name: getattr(case, name) for name in _SIZES[type(case)]},
            "experts_hit": case.experts_hit,
            "seed": case.seed,
            **self.peers,
        }


def roof_us(case: Case | DenseCase, ceilings: dict[str, float]) -> float:
    """Microseconds below which no version of a case can get: of its bytes or of its operations, the longer."""
    if not case.flop:
        return case.bytes / ceilings["copy"] * 1e6
    return max(case.bytes / ceilings["read"], case.flop / ceilings[RATES[case.recipe]]) * 1e6
