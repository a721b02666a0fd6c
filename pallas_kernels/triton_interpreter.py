"""Triton kernels on a CPU: Triton's own interpreter, fed with NumPy arrays, and with bfloat16 as the hardware has it.

The interpreter keeps bfloat16 as the 16-bit integers of its bits. Of Triton 3.9's operations on them some are right
(loads, stores, casts of bits); conversion truncates, and products work on the integers. Those are replaced here.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import ml_dtypes
import numpy as np
import triton.language as tl
from jaxtyping import Array
from triton.runtime import interpreter

_BF16 = np.dtype(ml_dtypes.bfloat16)

# XLA's threads, which run callbacks, flush subnormals, and a thread starts with its parent's setting: so one is started
# now, and kernels run on it.
_THREAD = ThreadPoolExecutor(1)
_THREAD.submit(int).result()


def interpret(
    kernel: Any,
    operands: tuple[Array, ...],
    out: jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...],
    grid: tuple[int, ...],
    constants: dict[str, Any],
) -> Any:
    """Runs the kernel on copies of the operands; what it does not write is all ones, so NaN for every float type."""

    def run(*arrays: Any) -> Any:
        results = [np.empty(part.shape, part.dtype) for part in jax.tree.leaves(out)]
        for result in results:
            result.view(np.uint8)[...] = 0xFF
        inputs = [np.array(array) for array in arrays]
        tensors = [_Tensor(array) for array in (*inputs, *results)]

        def launch() -> None:
            with np.errstate(all="ignore"):  # infinities and NaNs are results like any other
                kernel[grid](*tensors, **constants)

        _THREAD.submit(launch).result()
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return jax.pure_callback(run, out, *operands)


class _Tensor:
    """As much of a tensor as the interpreter asks for: an array's address and its dtype's name."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = array.dtype.name

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "_Tensor":
        return self

    def cpu(self) -> "_Tensor":
        return self

    def new_empty(self, *_: Any, **__: Any) -> "_Tensor":
        return self

    def set_(self, *_: Any) -> None:
        """Nothing: it is where it was."""

    def copy_(self, _: Any) -> None:
        """Nothing: the kernel wrote into this very array."""

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides


def _as_float32(handle: Any) -> np.ndarray:
    return handle.data.view(_BF16).astype(np.float32)


def _is_bf16(handle: Any) -> bool:
    return bool(handle.dtype.scalar == tl.bfloat16)


def _teach_bfloat16(builder: Any) -> None:
    """Replaces the interpreter's operations that take bfloat16's bits for integers, or truncate to them."""
    cast, convert, binary, dot = builder.cast_impl, builder.create_fp_to_fp, builder.binary_op, builder.create_dot
    to_float32 = interpreter._mxfp_value_handle_to_float32

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        pair = source.dtype.scalar, target.scalar
        if pair == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(source.data.astype(_BF16).view(np.uint16), tl.bfloat16)
        if pair == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(_as_float32(source), tl.float32)
        return cast(self, source, target)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if {source.dtype.scalar, target.scalar} == {tl.float32, tl.bfloat16}:
            return cast_impl(self, source, target)
        return convert(self, source, target, rounding)

    def binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if not _is_bf16(left):
            return binary(self, left, right, operation)
        result = operation(left.data.view(_BF16), right.data.view(_BF16))
        return interpreter.TensorHandle(result.view(np.uint16) if result.dtype == _BF16 else result, tl.bfloat16)

    def create_dot(self: Any, a: Any, b: Any, sums: Any, *rest: Any) -> Any:
        if not _is_bf16(a):
            return dot(self, a, b, sums, *rest)
        return interpreter.TensorHandle(_as_float32(a) @ _as_float32(b) + sums.data, sums.dtype.scalar)

    def value_to_float32(handle: Any) -> Any:
        return _as_float32(handle) if _is_bf16(handle) else to_float32(handle)

    for function in (cast_impl, create_fp_to_fp, binary_op, create_dot):
        setattr(builder, function.__name__, function)
    interpreter._mxfp_value_handle_to_float32 = value_to_float32


_teach_bfloat16(interpreter.InterpreterBuilder)
