"""The list of `grouped_matmul` calls that tests share: sizes, patterns of groups, and distributions of numbers.

`CASES` run anywhere in a moment; `Case.scaled_to` takes the same case to a model's real sizes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import Activation, MXFP4Array, Situ, SwiGLU, quantize_fp8_token, quantize_mxfp8

Random = np.random.Generator
_QUANTIZERS = {"w4a8": jax.jit(quantize_mxfp8), "w4a8_fp8": jax.jit(quantize_fp8_token)}
KIMI = Situ(4.0, 25.0)
KIMI_GATE_UP = {"depth": 3584, "width": 6144}  # one expert's [w1; w3] and w2
KIMI_DOWN = {"depth": 3072, "width": 3584}


def _part(rows: int, groups: int, rng: Random) -> np.ndarray:
    return rng.multinomial(rows, np.full(groups, 1 / groups))


def _skewed(rows: int, groups: int, rng: Random) -> np.ndarray:
    share = rng.permutation(0.5 ** np.arange(groups))
    return rng.multinomial(rows, share / share.sum())


def _sparse(rows: int, groups: int, rng: Random) -> np.ndarray:
    sizes = np.zeros(groups, np.int64)
    sizes[1::2] = _part(rows, groups // 2, rng)
    return sizes


def _all_in(index: int) -> Callable[[int, int, Random], np.ndarray]:
    def sizes(rows: int, groups: int, rng: Random) -> np.ndarray:
        return np.where(np.arange(groups) == index % groups, rows, 0)

    return sizes


# group sizes from (rows, groups, rng)
PATTERNS: dict[str, Callable[[int, int, Random], np.ndarray]] = {
    "balanced": lambda rows, groups, rng: np.full(groups, rows // groups),
    "random": _part,
    "skewed": _skewed,
    "every other group empty": _sparse,
    "all in the first": _all_in(0),
    "all in the last": _all_in(-1),
    "half of the rows": lambda rows, groups, rng: _part(rows // 2, groups, rng),
    "at most one row each": lambda rows, groups, rng: np.where(rng.permutation(groups) < min(rows, groups), 1, 0),
    "no rows": lambda rows, groups, rng: np.zeros(groups, np.int64),
}

# float32 rows from (rng, shape)
DISTRIBUTIONS: dict[str, Callable[[Random, tuple[int, int]], np.ndarray]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape, np.float32),
    "small": lambda rng, shape: 0.04 * rng.standard_normal(shape, np.float32),
    "outliers": lambda rng, shape: rng.standard_normal(shape, np.float32) * np.where(rng.random(shape) < 0.01, 100, 1),
    "rows of all magnitudes": lambda rng, shape: np.ldexp(
        rng.standard_normal(shape, np.float32), rng.integers(-20, 20, (shape[0], 1))
    ),
    "half zeros": lambda rng, shape: rng.standard_normal(shape, np.float32) * (rng.random(shape) < 0.5),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. `recipe` fixes the operands' formats and the tolerance, as in `numerics.KERNEL_TOLERANCES`."""

    recipe: str
    rows: int
    groups: int
    width: int
    depth: int
    pattern: str = "random"
    activation: Activation | None = None
    out_format: str = "bf16"
    distribution: str = "normal"
    seed: int = 0

    def __str__(self) -> str:
        sizes = f"{self.rows}x{self.depth} by {self.groups}x{self.width}"
        return f"{self.recipe} {sizes} {self.pattern}, {self.distribution}, {self.activation} to {self.out_format}"

    def scaled_to(self, *, rows: int, groups: int, depth: int, width: int) -> Self:
        """The same case at other sizes."""
        return dataclasses.replace(self, rows=rows, groups=groups, depth=depth, width=width)


@dataclasses.dataclass(frozen=True)
class Operands:
    """A call's arguments; rows of `x` in no group are NaN."""

    x: Any
    w: Any
    group_sizes: np.ndarray


def make_operands(case: Case) -> Operands:
    """Operands of a case, the same ones every time."""
    rng = np.random.default_rng(case.seed)
    group_sizes = PATTERNS[case.pattern](case.rows, case.groups, rng).astype(np.int32)
    rows = DISTRIBUTIONS[case.distribution](rng, (case.rows, case.depth)).astype(np.float32)
    rows[group_sizes.sum() :] = np.nan
    x = jnp.asarray(rows).astype(jnp.bfloat16)
    quantize = _QUANTIZERS.get(case.recipe, lambda rows: rows)
    return Operands(quantize(x), make_weights(case, rng), group_sizes)


def make_weights(case: Case, rng: Random) -> Any:
    """`[G, N, K]` of about unit gain: bfloat16, or all MXFP4 codes with the release's spread of scale bytes."""
    shape = (case.groups, case.width, case.depth)
    if case.recipe == "bf16":
        return jnp.asarray(rng.standard_normal(shape, np.float32) / np.sqrt(case.depth)).astype(jnp.bfloat16)
    codes = rng.integers(0, 256, (*shape[:2], case.depth // 2), np.uint8)
    scales = rng.integers(119, 123, (*shape[:2], case.depth // 32), np.uint8)
    return MXFP4Array(jnp.asarray(codes), jnp.asarray(scales))


CASES = [
    Case("bf16", 40, 5, 64, 96),
    Case("bf16", 40, 5, 64, 96, "half of the rows", KIMI),
    Case("bf16", 40, 5, 64, 96, "every other group empty", SwiGLU(), "f32", "half zeros"),
    Case("bf16", 37, 4, 66, 32, "all in the last", KIMI),  # widths that no tile likes
    Case("bf16", 24, 2, 64, 64, "balanced", out_format="mxfp8"),
    Case("w4a16", 40, 5, 64, 96, distribution="small"),
    Case("w4a16", 40, 6, 64, 96, "every other group empty", KIMI, distribution="outliers"),
    Case("w4a16", 1, 1, 96, 64, out_format="f32"),
    Case("w4a16", 3, 8, 64, 64, "at most one row each", Situ(1.0, None)),  # fewer rows than a tile
    Case("w4a16", 40, 5, 64, 96, "no rows", KIMI),
    Case("w4a16", 300, 3, 64, 64, "skewed", SwiGLU(), "f32"),  # groups of several row tiles
    Case("w4a16", 24, 2, 2048, 2048, "balanced"),  # several column tiles
    Case("w4a16", 24, 3, 128, 64, activation=KIMI, out_format="fp8_token"),
    Case("w4a8", 40, 5, 128, 96, activation=KIMI, out_format="mxfp8"),
    Case("w4a8", 40, 5, 64, 96, "all in the first", distribution="rows of all magnitudes"),
    Case("w4a8", 300, 3, 64, 64, "skewed", out_format="f32", distribution="outliers"),
    Case("w4a8_fp8", 40, 5, 128, 96, activation=KIMI, out_format="fp8_token"),
    Case("w4a8_fp8", 40, 5, 64, 96, "half of the rows", distribution="rows of all magnitudes"),
    Case("w4a8_fp8", 300, 3, 64, 64, "skewed", out_format="f32", distribution="outliers"),
    Case("bf16", 300, 3, 64, 64, "skewed", out_format="f32"),
]
