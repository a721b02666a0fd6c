"""The order in which a GPU's kernels keep MXFP4 weights in memory, and the exact way there and back.

The unit is 64 rows by 64 columns: 512 words of codes, then 32 words of scales. A warpgroup loads a unit with one
16-byte and one 4-byte read a thread, and every word holds what that one thread multiplies:

    thread  32*warp + 4*g + t        g in 0..7, t in 0..3
    word    2*block + half           rows 16*warp + 8*half + g, columns 32*block .. 32*block + 31, of those the
                                     eight that wgmma wants in this thread's registers
    scales  word 8*warp + g          bytes 2*block + half

With an activation, 8 rows of the gate and then the 8 matching rows of up fill the two halves of a warp's 16 rows, so
that a thread has both. Codes are spread over a word so that few operations make operands of them:

    "bf16"  pair p of columns 8*p + 2*t + {0, 1}: moved by (0, left 6, rotated right 6, left 4 and right 4) each half of
            a 32-bit register has its sign in bit 15 and its magnitude in bits 8..6, a bfloat16 of 2^-126 times the code
    "e4m3"  columns 16*j + 4*t + i: the magnitude in nibble 4*j + i selects a byte of a table, and bit 3 of nibbles
            2*i + 1 and 2*i holds the sign for j = 0 and 1, where a mask finds it

Exponents are kept relative to one of the expert's own, which the kernel applies in float32 at the end. Exact is any
expert whose non-zero blocks' scale bytes span at most 126 consecutive values ("bf16") or 12 ("e4m3"), at any base.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, UInt32

from pallas_kernels.mxfp4 import MXFP4Array

Mma = Literal["bf16", "e4m3"]

UNIT_ROWS = 64
UNIT_COLUMNS = 64
UNIT_WORDS = 544
WORD_ROWS = UNIT_WORDS // 32  # a unit is stored as rows of 32 words, 128 bytes
SPANS = {"bf16": 126, "e4m3": 12}  # consecutive scale bytes of non-zero blocks that are exact within an expert
RECIPES: dict[str, Mma] = {"w4a16": "bf16", "w4a8": "bf16", "w4a8_fp8": "e4m3"}

# Bits of (sign, magnitude 2, 1, 0) of a code in its word. "bf16": [pair, element]; "e4m3": [j, i].
_BITS = {
    "bf16": (
        ((15, 8, 7, 6), (31, 24, 23, 22)),
        ((9, 2, 1, 0), (25, 18, 17, 16)),
        ((21, 14, 13, 12), (5, 30, 29, 28)),
        ((11, 4, 3, 10), (27, 20, 19, 26)),
    ),
    "e4m3": tuple(
        tuple((8 * i + (7 if j == 0 else 3), *(16 * j + 4 * i + bit for bit in (2, 1, 0))) for i in range(4))
        for j in range(2)
    ),
}
_TOP = {"bf16": 253, "e4m3": 88}  # what the largest exponent is stored as
_STEP = {"bf16": 1, "e4m3": 8}  # what one exponent more adds to it: e4m3's exponent field starts at bit 3
_EMPTY = 255  # "e4m3": an all-zero block of scale byte 0 outside the span


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class KernelWeights:
    """MXFP4 weights `[G, N, K]` in a GPU's kernels' order; made by `to_kernel_layout` only.

    Attributes:
        words: uint32 `[G, N/64, K/64 * 17, 32]`.
        exponents: int32 `[G]`: what each expert's products are multiplied by, as a power of two. Of weights whose N or
            K lies on several devices, each laid out by itself, there are G for every part, one part after another.
        mma: the tensor cores' operand type that the order is for.
        gated: whether rows of gate and up are interleaved.
    """

    words: UInt32[Array, "g units lines 32"]
    exponents: Int32[Array, " g"]
    mma: Mma
    gated: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """The logical shape `(G, N, K)`."""
        groups, units, lines, _ = self.words.shape
        return groups, units * UNIT_ROWS, lines // WORD_ROWS * UNIT_COLUMNS

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], tuple[Mma, bool]]:
        key = jax.tree_util.GetAttrKey
        return ((key("words"), self.words), (key("exponents"), self.exponents)), (self.mma, self.gated)

    @classmethod
    def tree_unflatten(cls, static: tuple[Mma, bool], leaves: tuple[Any, Any]) -> "KernelWeights":
        # JAX also unflattens placeholders that are no arrays, so nothing is checked here.
        self = object.__new__(cls)
        for name, value in zip(("words", "exponents", "mma", "gated"), (*leaves, *static), strict=True):
            object.__setattr__(self, name, value)
        return self


def to_kernel_layout(w: MXFP4Array, *, recipe: str, gated: bool, first_expert: int = 0) -> KernelWeights:
    """Re-lays `w [G, N, K]` out for a GPU's kernels, exactly; `gated`: N counts gate rows and then up rows.

    Errors count experts from `first_expert`, for weights that are a part of a layer's.

    Works expert by expert, so that its temporaries stay small. Not for use under `jit`: it looks at the scales. Shapes
    without values (`jax.ShapeDtypeStruct`) become such.

    Raises:
        ValueError: `w` is not `[G, N, K]`, or `recipe` is not one of `w4a16`, `w4a8`, `w4a8_fp8`.
        NotImplementedError: N or K is not a multiple of 64, a scale byte is NaN's, or an expert's scales span more than
            the kernel can hold; the expert is named.
    """
    if recipe not in RECIPES:
        raise ValueError(f"to_kernel_layout: recipe={recipe!r} is not one of {', '.join(RECIPES)}")
    if w.ndim != 3:
        raise ValueError(f"to_kernel_layout: weights have shape {w.shape}; [G, N, K] is needed")
    if w.shape[1] % UNIT_ROWS or w.shape[2] % UNIT_COLUMNS:
        raise NotImplementedError(f"the kernel needs N and K in multiples of 64; the weights are {w.shape}")
    mma = RECIPES[recipe]
    if isinstance(w.codes, jax.ShapeDtypeStruct):
        shapes = jax.eval_shape(functools.partial(_pack, mma=mma, gated=gated), w.codes, w.scales)
        return KernelWeights.tree_unflatten((mma, gated), shapes)
    _require_span(w, mma, first_expert)
    words, exponents = _pack(w.codes, w.scales, mma, gated)
    return KernelWeights(words, exponents, mma, gated)


def from_kernel_layout(w: KernelWeights) -> MXFP4Array:
    """The weights that `to_kernel_layout` was given, to the bit."""
    return MXFP4Array(*_unpack(w.words, w.exponents, w.mma, w.gated))


def _require_span(w: MXFP4Array, mma: Mma, first_expert: int) -> None:
    """Raises NotImplementedError naming the first expert whose scales the kernel cannot hold exactly."""
    most, least, outside = (np.asarray(a) for a in _extremes(w.codes, w.scales, mma))
    for expert in np.flatnonzero((most == 255) | (most - least >= SPANS[mma]) | outside):
        number = first_expert + int(expert)
        if most[expert] == 255:
            raise NotImplementedError(f"expert {number} has a NaN scale (byte 255), which the kernel cannot hold")
        raise NotImplementedError(
            f"expert {number}: scale bytes from {least[expert]} to {most[expert]}; the kernel is exact for at "
            f"most {SPANS[mma]} consecutive scale bytes within an expert. Use implementation='xla' for these weights"
        )


@functools.partial(jax.jit, static_argnames="mma")
def _extremes(codes: Array, scales: Array, mma: Mma) -> tuple[Array, Array, Array]:
    """For each expert its largest byte, the least byte of a non-zero block, and whether a zero block cannot be kept."""

    def one(expert: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        code, scale = expert
        zero = ((code & 0x77) == 0).reshape(*scale.shape, 16).all(-1)
        byte = scale.astype(jnp.int32)
        most = byte.max()
        below = byte <= most - (SPANS["e4m3"] if mma == "e4m3" else _TOP["bf16"])
        return most, jnp.where(zero, most, byte).min(), (zero & below & ((byte != 0) | (mma == "bf16"))).any()

    return jax.lax.map(one, (codes, scales))


def row_order(n: int, gated: bool) -> np.ndarray:
    """The logical row that each row of the kernel's order holds, int `[n]`."""
    rows = np.arange(n)
    return rows.reshape(2, n // 16, 8).transpose(1, 0, 2).reshape(n) if gated else rows


# Axes of rows [unit, warp, half, g] by columns [kb, block, p or j, t, e] or [kb, block, j, t, i] to words, and back.
_SPLIT = {"bf16": (2, 4, 4, 2), "e4m3": (2, 2, 4, 4)}
_TO_WORDS = (0, 4, 1, 3, 7, 5, 2, 6, 8)
_SCALES_TO_WORDS = (0, 4, 1, 3, 5, 2)


@functools.partial(jax.jit, static_argnames=("mma", "gated"))
def _pack(codes: Array, scales: Array, mma: Mma, gated: bool) -> tuple[Array, Array]:
    n, k = codes.shape[1], codes.shape[2] * 2
    order = row_order(n, gated)

    def one(expert: tuple[Array, Array]) -> tuple[Array, Array]:
        code, scale = (part[order] for part in expert)
        nibbles = jnp.stack([code & 15, code >> 4], axis=-1).astype(jnp.uint32)
        x = nibbles.reshape(n // 64, 4, 2, 8, k // 64, *_SPLIT[mma]).transpose(_TO_WORDS)
        word = jnp.zeros(x.shape[:-2], jnp.uint32)
        for a, b in np.ndindex(x.shape[-2:]):
            for bit, place in zip((3, 2, 1, 0), _BITS[mma][a][b], strict=True):
                word |= ((x[..., a, b] >> bit) & 1) << place
        byte = scale.astype(jnp.int32)
        most = byte.max()
        stored = _TOP[mma] + (byte - most) * _STEP[mma]
        stored = jnp.where(stored < 0, _EMPTY, stored).astype(jnp.uint32)
        s = stored.reshape(n // 64, 4, 2, 8, k // 64, 2).transpose(_SCALES_TO_WORDS).reshape(n // 64, k // 64, 32, 4)
        s = s[..., 0] | s[..., 1] << 8 | s[..., 2] << 16 | s[..., 3] << 24
        unit = jnp.concatenate([word.reshape(n // 64, k // 64, 512), s], axis=-1)
        return unit.reshape(n // 64, k // 64 * WORD_ROWS, 32), most - 127 - (6 if mma == "e4m3" else 0)

    return jax.lax.map(one, (codes, scales))


def read_unit(words: UInt32[Array, " 544"], mma: Mma) -> tuple[UInt32[Array, "64 64"], Int32[Array, "64 2"]]:
    """The codes of a unit, by row and column, and its scales as they are stored, by row and block."""
    word = words[:512].reshape(4, 8, 4, 2, 2)  # warp, g, t, block, half
    columns = [[_gather_bits(word, places) for places in row] for row in _BITS[mma]]
    codes = jnp.stack([jnp.stack(row, -1) for row in columns], -2)  # warp, g, t, block, half, p or j, e or i
    scales = jnp.stack([(words[512:] >> shift) & 255 for shift in (0, 8, 16, 24)], -1).astype(jnp.int32)
    return (
        codes.transpose(0, 4, 1, 3, 5, 2, 6).reshape(64, 64),
        scales.reshape(4, 8, 2, 2).transpose(0, 3, 1, 2).reshape(64, 2),
    )


def _gather_bits(word: Array, places: tuple[int, ...]) -> Array:
    """The code whose bits, sign first, are at `places` of `word`."""
    code = jnp.zeros_like(word)
    for bit, place in zip((3, 2, 1, 0), places, strict=True):
        code |= ((word >> place) & 1) << bit
    return code


@functools.partial(jax.jit, static_argnames=("mma", "gated"))
def _unpack(words: Array, exponents: Array, mma: Mma, gated: bool) -> tuple[Array, Array]:
    n, k = words.shape[1] * 64, words.shape[2] // WORD_ROWS * 64
    back = np.argsort(row_order(n, gated))

    def one(expert: tuple[Array, Array]) -> tuple[Array, Array]:
        lines, exponent = expert
        units = lines.reshape(n // 64, k // 64, UNIT_WORDS)
        codes, stored = jax.vmap(jax.vmap(functools.partial(read_unit, mma=mma)))(units)
        codes = codes.transpose(0, 2, 1, 3).reshape(n, k // 2, 2).astype(jnp.uint8)
        stored = stored.transpose(0, 2, 1, 3).reshape(n, k // 32)
        most = exponent + 127 + (6 if mma == "e4m3" else 0)
        byte = (stored - _TOP[mma]) // _STEP[mma] + most
        byte = jnp.where(stored == _EMPTY, 0, byte) if mma == "e4m3" else byte
        return (codes[..., 0] | codes[..., 1] << 4)[back], byte.astype(jnp.uint8)[back]

    return jax.lax.map(one, (words, exponents))
