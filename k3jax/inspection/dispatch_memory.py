"""How many bytes the routed experts' buffers take on one device, from a config and a layout alone.

No token is dropped whatever experts it picks, and XLA's arrays have fixed sizes: so every buffer has room for the worst
case, in which all tokens that meet on a rank pick experts of that rank. `max_tokens` bounds how many these are.
"""

import dataclasses

from k3jax.config import K3Config
from k3jax.options import DEFAULTS, LoadOptions
from sharding import MeshSizes, choose_transport
from sharding.traffic import ELEMENT_BYTES

_ROW_BYTES = {"bf16": 0.0, "w4a16": 0.0, "w4a8": ELEMENT_BYTES["mxfp8"], "w4a8_fp8": 1.0}
"""Bytes an element of a row's quantised copy, beside the bfloat16 that it is made from."""


@dataclasses.dataclass(frozen=True)
class DispatchMemory:
    """Bytes on one device while the routed experts run.

    Attributes:
        tokens: latent rows and their sums, of all tokens that the device has.
        travel: rows and sums that are sent or received; 0 where tokens do not travel.
        rows: the experts' input and output, a row for every (token, pick), quantised copies included.
        hidden: between their two products, the same.
    """

    tokens: int
    travel: int
    rows: int
    hidden: int

    @property
    def total(self) -> int:
        """All of it; what is live at once is at most this."""
        return self.tokens + self.travel + self.rows + self.hidden


def dispatch_memory(
    config: K3Config,
    sizes: MeshSizes,
    num_tokens: int,
    *,
    recipe: str = "w4a16",
    tokens: str = "replicated",
    options: LoadOptions = DEFAULTS,
) -> DispatchMemory:
    """For a call with `num_tokens` over all devices of a mesh of that size.

    A CPU has no ragged all-to-all: what stands in for it takes several times `travel`.
    """
    assert config.num_experts is not None, "the config has no experts"
    latent, picks = config.latent_size, config.experts_per_token
    meeting = sizes.expert if tokens == "sharded" else 1
    own = -(-max(num_tokens, 1) // (sizes.data * meeting))
    at_once = own if options.max_tokens is None else min(own, max(options.max_tokens // meeting, 1))
    met = at_once * meeting
    wire = ELEMENT_BYTES[options.wire]
    travel = 0.0
    if meeting > 1:
        transport = options.transport or choose_transport(meeting, config.num_experts, picks, options.gpus_per_node)
        # One copy a (token, rank) is packed before it leaves, and its sum is when it comes back.
        packed = at_once * min(meeting, picks) if transport == "per_rank" else 0
        travel = (met + packed) * latent * (2 + wire) + met * picks * 8
    rows, width = met * picks, config.expert_width // sizes.tensor
    result = 2 if sizes.tensor == 1 else 4
    return DispatchMemory(
        tokens=own * latent * (2 + 4),
        travel=round(travel),
        rows=round(rows * (latent * (2 + _ROW_BYTES[recipe] + result) + 3 * 4)),
        hidden=round(rows * width * (2 + _ROW_BYTES[recipe])),
    )
