"""The oracle: the layers in NumPy float64. It imports nothing of JAX and shares no code with the layers."""

from k3jax.reference.formats import round_bf16
from k3jax.reference.layer import activation, expert_rows, oracle_trace

__all__ = ["activation", "expert_rows", "oracle_trace", "round_bf16"]
