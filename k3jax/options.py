"""Choices of loading and running a layer that few callers change."""

import dataclasses

from k3jax.byte_count import Told

DENSE_WEIGHTS = ("bf16", "fp8")


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """How a layer may treat what a checkpoint holds, and how it runs.

    Attributes:
        dense_weights: "bf16", or "fp8" to quantise shared experts, latent projections and dense layers to e4m3 with a
            scale for each 128 x 128 values: half their bytes. Never the router.
        quantize_plain: let a recipe with MXFP4 weights quantise experts that are stored otherwise, plain or in NVFP4.
            Without it, loading such experts raises: rounding a model is not something to happen unasked. Recipe "bf16"
            takes any experts, either way.
        allow_inexact: let a kernel whose layout cannot hold an expert's span of exponents round the smallest blocks,
            with a warning that says how much is lost. Without it, such a kernel is passed over, or raises if named.
        wire: over a mesh, the format of partial sums that ranks add up: "f32", which gives one device's numbers, or
            "bf16", half the bytes.
        split_shared: with sharded tokens, split shared experts and dense layers over the ranks, which then gather
            tokens and scatter sums, instead of a whole copy on each.
        max_tokens: how many tokens a rank's experts take at a time; larger batches are worked on in chunks. None is all
            at once. No token is ever dropped, so buffers have room for all of them to pick experts of one rank:
            at the release's sizes the default takes up to 2.9 GB (`k3jax.inspection.dispatch_memory`).
        transport: with sharded tokens, how rows travel: "all_gather", "per_rank", or None to have it chosen.
        gpus_per_node: GPUs that reach each other at full speed. A dense layer with replicated tokens is split over no
            more ranks than this, and `choose_transport` asks for it.
        host_memory: bytes of the host's memory that loading experts may take beside what the layer itself is held in.
        progress: called while layers are read, with the bytes done, the bytes of all layers asked for, and what is read
            now; `k3jax.progress.bytes_bar` makes one that shows them with their rate and the time left.
    """

    dense_weights: str = "bf16"
    quantize_plain: bool = False
    allow_inexact: bool = False
    wire: str = "f32"
    split_shared: bool = False
    transport: str | None = None
    max_tokens: int | None = 8192
    gpus_per_node: int = 8
    host_memory: int = 1 << 30
    progress: Told | None = None

    def __post_init__(self) -> None:
        if self.dense_weights not in DENSE_WEIGHTS:
            raise ValueError(
                f"LoadOptions: dense_weights={self.dense_weights!r} is not one of {', '.join(DENSE_WEIGHTS)}"
            )
        for name in ("max_tokens", "gpus_per_node", "host_memory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"LoadOptions: {name}={value} must be positive")


DEFAULTS = LoadOptions()
