"""`ragged_all_to_all`: XLA's on platforms that have it, and the same contract in padded `all_to_all`s on a CPU."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def ragged_all_to_all(
    operand: Array,
    output: Array,
    *,
    input_offsets: Int[Array, " r"],
    send_sizes: Int[Array, " r"],
    output_offsets: Int[Array, " r"],
    recv_sizes: Int[Array, " r"],
    axes: tuple[str, ...],
) -> Array:
    """Sends slices of `operand [n, ...]` to the R ranks along mesh `axes`, into their `output [m, ...]`.

        for sender in ranks:
            for receiver in ranks:
                start, size = sender.input_offsets[receiver], sender.send_sizes[receiver]
                at = sender.output_offsets[receiver]            # in the receiver's output: the sender says where
                receiver.output[at : at + size] = sender.operand[start : start + size]

    `recv_sizes[r]` is what rank r sends here: its `send_sizes` for this rank. Rows of `output` that nobody writes stay
    as they are. Offsets and sizes are int32 and must stay within the arrays. Within `shard_map`; differentiable with
    respect to `operand` where no row is written twice.
    """
    layout = (input_offsets, send_sizes, output_offsets, recv_sizes)
    return _exchange(operand, output, layout, axes, operand.shape[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _exchange(operand: Array, output: Array, layout: tuple[Array, ...], axes: tuple[str, ...], sent: int) -> Array:
    # Under vmap one exchange after another: JAX's own has no batching rule for such arrays.
    return jax.custom_batching.sequential_vmap(functools.partial(_exchange_one, axes=axes))(operand, output, *layout)


def _exchange_one(operand: Array, output: Array, *layout: Array, axes: tuple[str, ...]) -> Array:
    return jax.lax.platform_dependent(
        operand,
        output,
        *layout,
        cpu=functools.partial(padded_all_to_all, axes=axes),
        default=functools.partial(_native, axes=axes),
    )


def _forward(
    operand: Array, output: Array, layout: tuple[Array, ...], axes: tuple[str, ...], sent: int
) -> tuple[Array, tuple[Array, ...]]:
    return _exchange(operand, output, layout, axes, sent), layout


def _backward(axes: tuple[str, ...], sent: int, layout: tuple[Array, ...], d_result: Array) -> tuple[Array, None, None]:
    """Every slice goes back to where it came from, which its receiver learns from its sender."""
    input_offsets, send_sizes, output_offsets, recv_sizes = layout
    told = jnp.stack([output_offsets, input_offsets], axis=1)
    arrived_at, came_from = jax.lax.all_to_all(told, axes, 0, 0, tiled=True).T
    d_operand = jnp.zeros((sent, *d_result.shape[1:]), d_result.dtype)
    back = (arrived_at, recv_sizes, came_from, send_sizes)
    return _exchange(d_result, d_operand, back, axes, d_result.shape[0]), None, None


_exchange.defvjp(_forward, _backward)


def _native(operand: Array, output: Array, *layout: Array, axes: tuple[str, ...]) -> Array:
    return jax.lax.ragged_all_to_all(operand, output, *layout, axis_name=axes)


def padded_all_to_all(
    operand: Array,
    output: Array,
    input_offsets: Array,
    send_sizes: Array,
    output_offsets: Array,
    recv_sizes: Array,
    *,
    axes: tuple[str, ...],
) -> Array:
    """The same by sending as many rows to each rank as `operand` has: R times the memory, and no native collective."""
    most = operand.shape[0]
    if most == 0 or output.shape[0] == 0:
        return output
    line = jnp.arange(most, dtype=jnp.int32)[None, :]
    slices = operand[jnp.minimum(input_offsets[:, None] + line, most - 1)]
    arrived, offsets, sizes = (
        jax.lax.all_to_all(part, axes, 0, 0, tiled=True) for part in (slices, output_offsets, send_sizes)
    )
    row = jnp.where(line < sizes[:, None], offsets[:, None] + line, output.shape[0])
    return output.at[row.reshape(-1)].set(arrived.reshape(-1, *operand.shape[1:]), mode="drop")
