"""`after`: an array that is there only once another is, so that what reads it starts no earlier."""

import functools

import jax
from jaxtyping import Array, Shaped

from pallas_kernels import row_kernels, select


@functools.partial(jax.jit, static_argnames=("implementation",))
def after(
    x: Shaped[Array, "..."], earlier: Shaped[Array, "..."], *, implementation: str | None = None
) -> Shaped[Array, "..."]:
    """`x`, whose readers wait for `earlier`.

    Where kernels of a CUDA graph may run side by side, the blocks of one that is in no hurry can keep from the device
    those of one that others wait for. What reads `after(x, earlier)` starts behind what makes `earlier`.

    Args:
        x: any shape; bfloat16 for "mosaic". earlier: an array, of which nothing is read.
        implementation: "reference" or "xla" (`x` itself: XLA has no such order of kernels), "mosaic" (Hopper and
            Blackwell, up to 1 MiB: a copy, which reads and writes `x` once), or None for the first that can.

    Returns:
        The bits of `x`. Differentiable with respect to `x`.

    Raises:
        ValueError: no such implementation exists.
        NotImplementedError: the named implementation cannot run this here.
    """
    chosen = select.choose("after", implementation, x=x)
    return row_kernels.moves(chosen).after(x, earlier) if chosen in row_kernels.IMPLEMENTATIONS else x
