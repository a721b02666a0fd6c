"""What a checkpoint folder holds, what is wrong with it, and the memory that its weights need."""

from k3jax.inspection.summary import inspect_checkpoint

__all__ = ["inspect_checkpoint"]
