"""Triton kernels called from JAX: through jax-triton, whose versions differ, or on a CPU in Triton's own interpreter.

A process started with TRITON_INTERPRET=1 interprets: `triton.jit` looks at it once, at the import. Nothing here imports
Triton before a kernel is wanted, so the library works on a machine without it.
"""

import functools
import importlib.util
import inspect
import os
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array


def why_not() -> str | None:
    """Why no Triton kernel can run in this process; None if one can."""
    missing = [name for name in ("triton", *(() if interpreted() else ("jax_triton",))) if not _installed(name)]
    if missing:
        return f"{' and '.join(missing)} cannot be imported; the extras cuda12 and cuda13 bring jax-triton"
    if interpreted() or capability() is not None:
        return None
    return f"it needs an NVIDIA GPU of compute capability 8.0 or more, and this is {jax.devices()[0].device_kind}"


def capability(device: Any = None) -> int | None:
    """The compute capability of `device` (default: the first one) as 80, 90, 100; None below 80, and without a GPU."""
    text = getattr(device or jax.devices()[0], "compute_capability", None)
    if not isinstance(text, str) or not text.replace(".", "").isdigit():
        return None
    major, _, minor = text.partition(".")
    number = int(major) * 10 + int(minor or 0)
    return number if number >= 80 else None


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, which wants to see the function itself and not a type checker's wrapper around it."""
    import triton

    return triton.jit(inspect.unwrap(function))


def triton_call(
    kernel: Any,
    *operands: Array,
    out: jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...],
    grid: tuple[int, ...],
    target: int | None,
    warps: int,
    stages: int,
    constants: dict[str, Any],
) -> Any:
    """The arrays of `out` that `kernel(*operands, *out, **constants)` writes, launched over `grid`.

    Args:
        target: the compute capability to compile for, as `capability` gives it.
        warps: of a block.
        stages: of the loops' pipelines.
        constants: the kernel's `tl.constexpr` parameters.
    """
    if interpreted():
        from pallas_kernels.triton_interpreter import interpret

        return interpret(kernel, operands, out, grid, constants)
    import jax_triton

    known = inspect.signature(jax_triton.triton_call).parameters
    options: dict[str, Any] = {"out_type": out} if "out_type" in known else {"out_shape": out}
    fusion = {"enable_fp_fusion": True}  # Triton 3.9 wants to be told
    options |= {"backend_options": fusion} if "backend_options" in known else fusion
    return jax_triton.triton_call(
        *operands,
        kernel=kernel,
        grid=grid,
        num_warps=warps,
        num_stages=stages,
        compute_capability=target,
        **options,
        **constants,
    )


def interpreted() -> bool:
    """Whether this process runs kernels in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
