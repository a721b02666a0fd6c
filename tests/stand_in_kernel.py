"""A CPU that claims to be a Hopper GPU: real layouts, and the kernels' products by `xla` from their weights."""

from typing import Any

import jax
import pytest

from pallas_kernels import KernelWeights, from_kernel_layout, select
from pallas_kernels import grouped_matmul as public_grouped_matmul
from pallas_kernels.grouped_matmul import mosaic_hopper, mosaic_hopper_dense


def claim_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends."""

    def stand_in(x: Any, w: KernelWeights, group_sizes: jax.Array, *, activation: Any, out_format: str) -> Any:
        return public_grouped_matmul(
            x,
            from_kernel_layout(w),
            group_sizes,
            activation=activation,
            out_format=out_format,
            implementation="xla",
        )

    def dense_stand_in(x: Any, w: jax.Array, group_sizes: jax.Array, *, activation: Any, out_format: str) -> Any:
        assert out_format in ("bf16", "f32"), "the kernel has no quantiser"
        how: Any = {"activation": activation, "out_format": out_format}
        return public_grouped_matmul(x, w, group_sizes, **how, implementation="xla")

    answer = select._why_not

    def why_not(op: str, name: str, *operands: Any) -> str | None:
        if name == "mosaic" and op != "grouped_matmul":
            return "nothing stands in for it"
        return answer(op, name, *operands)

    monkeypatch.setattr(select, "why_not_on_gpu", lambda name, _: None if name == "mosaic" else "absent")
    monkeypatch.setattr(mosaic_hopper, "grouped_matmul", stand_in)
    monkeypatch.setattr(mosaic_hopper_dense, "grouped_matmul", dense_stand_in)
    monkeypatch.setattr(select, "_why_not", why_not)
