"""The Triton kernels compiled without a GPU for Ampere, Hopper and Blackwell: one table says what each must consist of,
and the check is shown to fail for the programs that it is there to keep out."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from annotations import unchecked_annotations
from compiled_triton import SHARED_MEMORY, Gpus, Program, lower, program

from pallas_kernels import Activation, KernelWeights, MXFP4Array, MXFP8Array, Situ, SwiGLU, TokenScaledArray
from pallas_kernels import triton_call as adapter
from pallas_kernels.grouped_matmul.kernel_layout import UNIT_COLUMNS, UNIT_ROWS, WORD_ROWS
from pallas_kernels.grouped_matmul.triton.tuning import PlainTuning
from pallas_kernels.grouped_matmul.triton_gemm import grouped_matmul, temporary_bytes

KIMI = Situ(4.0, 25.0)
GROUPS = 112
SHAPES = {"w13": (6144, 3584), "w2": (3584, 3072)}
F16, BLOCK_SCALE = "tcgen05.mma.kind::f16", "tcgen05.mma.kind::mxf8f6f4.block_scale"
TANH = "0f3BA4396C"  # 5.01172783e-3, a coefficient of the fraction for tanh


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel of one recipe for one architecture, the products it must have, and the spilled bytes it may have."""

    recipe: str
    target: int
    rows: int
    product: str
    spilled: int = 0
    shape: str = "w13"
    activation: Activation | None = KIMI

    def __str__(self) -> str:
        return f"{self.shape} {self.recipe} {self.rows} rows sm_{self.target} {self.activation}"


TABLE = [
    Case("bf16", 80, 16384, "mma.sync"),
    Case("w4a16", 80, 16384, "mma.sync"),
    Case("w4a16", 80, 128, "mma.sync", shape="w2", activation=None),
    Case("bf16", 90, 16384, "wgmma.mma_async"),
    Case("w4a16", 90, 128, "wgmma.mma_async"),
    Case("w4a16", 90, 16384, "wgmma.mma_async", spilled=40),
    Case("w4a16", 90, 16384, "wgmma.mma_async", spilled=40, shape="w2", activation=None),
    Case("w4a8", 90, 2048, "wgmma.mma_async", activation=SwiGLU()),
    Case("w4a8_fp8", 90, 2048, "wgmma.mma_async"),
    Case("bf16", 100, 16384, F16),
    Case("w4a16", 100, 128, F16),
    Case("w4a16", 100, 16384, F16),
    Case("w4a8", 100, 128, BLOCK_SCALE),
    Case("w4a8", 100, 16384, BLOCK_SCALE),
    Case("w4a8", 100, 16384, BLOCK_SCALE, shape="w2", activation=None),
    Case("w4a8_fp8", 100, 2048, BLOCK_SCALE, activation=SwiGLU()),
]


def shape_of(*shape: int, dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def operands(case: Case) -> tuple[Any, Any, jax.ShapeDtypeStruct]:
    """Shapes of x, w and group_sizes as the recipe and the architecture have them."""
    n, k = SHAPES[case.shape]
    x = shape_of(case.rows, k, dtype=jnp.bfloat16)
    e4m3 = shape_of(case.rows, k, dtype=jnp.float8_e4m3fn)
    with unchecked_annotations():
        if case.recipe == "w4a8":
            x = MXFP8Array(e4m3, shape_of(case.rows, k // 32, dtype=jnp.uint8))
        if case.recipe == "w4a8_fp8":
            x = TokenScaledArray(e4m3, shape_of(case.rows, 1, dtype=jnp.float32))
        if case.recipe == "bf16":
            w = shape_of(GROUPS, n, k, dtype=jnp.bfloat16)
        elif case.target >= 100:
            codes, scales = (shape_of(GROUPS, n, k // each, dtype=jnp.uint8) for each in (2, 32))
            w = MXFP4Array(codes, scales)
        else:
            words = shape_of(GROUPS, n // UNIT_ROWS, k // UNIT_COLUMNS * WORD_ROWS, 32, dtype=jnp.uint32)
            w = KernelWeights(words, shape_of(GROUPS, dtype=jnp.int32), "bf16", case.activation is not None)
    return x, w, shape_of(GROUPS, dtype=jnp.int32)


def call(case: Case, tuning: PlainTuning | None = None) -> Any:
    def product(x: Any, w: Any, group_sizes: jax.Array) -> jax.Array:
        return grouped_matmul(
            x,
            w,
            group_sizes,
            activation=case.activation,
            dtype=jnp.dtype(jnp.bfloat16),
            tuning=tuning,
            target=case.target,
        )

    return product


def check(compiled: Program, case: Case) -> None:
    """Asserts that the program is the one that the table wants."""
    assert compiled.products == {case.product}
    # The activation is chosen at compile time: its instructions are there exactly when it was asked for.
    assert ("ex2.approx" in compiled.ptx) == (case.activation is not None)
    assert (TANH in compiled.ptx) == isinstance(case.activation, Situ)
    assert compiled.spilled <= case.spilled
    assert compiled.shared_memory <= SHARED_MEMORY[case.target]


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_the_program_is_the_one_we_think_it_is(case: Case, gpus: Gpus) -> None:
    check(program(call(case), operands(case), gpus, case.target), case)


def test_64_rows_of_weights_are_too_few_for_blackwell(gpus: Gpus) -> None:
    case = Case("w4a8", 100, 2048, BLOCK_SCALE)
    few = program(call(case, PlainTuning(64, 128, 32, 4, 3)), operands(case), gpus, 100)
    with pytest.raises(AssertionError, match="kind::f16"):
        check(few, case)


def test_a_dropped_activation_is_seen(gpus: Gpus) -> None:
    case = Case("w4a8", 100, 8192, BLOCK_SCALE)
    without = dataclasses.replace(case, activation=None)
    plain = program(call(without), operands(without), gpus, 100)
    check(plain, without)
    with pytest.raises(AssertionError, match="ex2"):
        check(plain, case)


def test_decoding_on_blackwell_is_seen(gpus: Gpus) -> None:
    case = Case("w4a8", 100, 4096, BLOCK_SCALE)
    upcast = dataclasses.replace(case, recipe="w4a16")
    decoded = program(call(upcast), operands(upcast), gpus, 100)
    with pytest.raises(AssertionError, match="kind::f16"):
        check(decoded, case)


@pytest.mark.parametrize("target", SHARED_MEMORY)
@pytest.mark.parametrize("op", ["situ", "mxfp8", "fp8_token"])
def test_a_pass_over_rows_has_no_product(op: str, target: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    from pallas_kernels.row_kernels import triton_rows

    monkeypatch.setattr(triton_rows, "capability", lambda: target)
    functions: dict[str, Any] = {
        "situ": lambda x: triton_rows.gated(KIMI, x),
        "mxfp8": triton_rows.quantize_mxfp8,
        "fp8_token": triton_rows.quantize_fp8_token,
    }
    compiled = program(functions[op], (shape_of(256, 6144, dtype=jnp.bfloat16),), gpus, target)
    assert compiled.products == set()
    assert (TANH in compiled.ptx) == (op == "situ")
    assert compiled.spilled == 0
    assert compiled.shared_memory <= SHARED_MEMORY[target]


@pytest.mark.parametrize("target", SHARED_MEMORY)
@pytest.mark.parametrize(("op", "dtype"), [("gather", "bfloat16"), ("combine", "bfloat16"), ("combine", "float32")])
def test_rows_move_sixteen_bytes_at_a_time(
    op: str, dtype: str, target: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pallas_kernels.row_kernels import triton_moves

    monkeypatch.setattr(triton_moves, "capability", lambda: target)
    rows = shape_of(16384, 3584, dtype=jnp.dtype(dtype))
    places, weights = (shape_of(1024, 16, dtype=kind) for kind in (jnp.int32, jnp.float32))
    if op == "gather":
        tokens = shape_of(1024, 3584, dtype=jnp.dtype(dtype))
        compiled = program(lambda x, at: triton_moves.gather_rows(x, at, 16384), (tokens, places), gpus, target)
    else:
        compiled = program(triton_moves.combine_rows, (rows, places, weights), gpus, target)
    wide = re.findall(r"ld\.global\S*v4\.b32", compiled.ptx)
    of_rows = (1 if dtype == "bfloat16" else 2) * (1 if op == "gather" else 16)
    assert len(wide) == of_rows
    # Beside the rows, a place for each, and a weight; nothing twice.
    assert len(re.findall(r"ld\.global", compiled.ptx)) == of_rows + (16 if op == "gather" else 2 * 16)
    assert len(re.findall(r"st\.global\S*v4\.b32", compiled.ptx)) == (16 if op == "gather" else 2)
    assert len(re.findall(r"st\.global", compiled.ptx)) == (16 if op == "gather" else 2)
    assert compiled.products == set()
    assert compiled.spilled == 0
    assert compiled.shared_memory <= 2048, "sums are turned round for their store, at most"


@pytest.mark.parametrize("slots", [16, 4096])
@pytest.mark.parametrize("target", SHARED_MEMORY)
def test_slots_are_sorted_in_one_kernel(slots: int, target: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    from pallas_kernels.row_kernels import triton_schedule

    monkeypatch.setattr(triton_schedule, "capability", lambda: target)
    ids = shape_of(slots // 16, 16, dtype=jnp.int32)
    compiled = program(lambda ids: triton_schedule.schedule_rows(ids, 896), (ids,), gpus, target)
    assert compiled.products == set()
    assert compiled.spilled == 0
    assert "atom" not in compiled.ptx
    assert compiled.shared_memory <= 8192


@pytest.mark.parametrize("tokens", [1, 1024])
@pytest.mark.parametrize("target", SHARED_MEMORY)
def test_picks_are_one_kernel(tokens: int, target: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    from pallas_kernels.row_kernels import triton_top_k

    monkeypatch.setattr(triton_top_k, "capability", lambda: target)
    values = shape_of(tokens, 896, dtype=jnp.float32)
    compiled = program(lambda values: triton_top_k.top_k(values, 16), (values,), gpus, target)
    assert compiled.products == set()
    assert compiled.spilled == 0
    assert compiled.shared_memory <= 1024


@pytest.mark.parametrize(
    ("recipe", "target"), [("w4a16", 90), ("w4a8", 90), ("w4a8_fp8", 90), ("w4a8", 100), ("w4a8_fp8", 100)]
)
def test_temporaries_are_those_that_are_stated(recipe: str, target: int, gpus: Gpus) -> None:
    case = Case(recipe, target, 2048 if target == 90 else 128, "")
    arguments = operands(case)
    analysis = lower(call(case), arguments, gpus, target).compile().memory_analysis()
    with unchecked_annotations():
        stated = temporary_bytes(arguments[0], arguments[1], target)
    assert stated <= analysis.temp_size_in_bytes * 1.3
    assert analysis.temp_size_in_bytes <= 1.3 * stated + 4096


def test_a_gpu_names_its_capability() -> None:
    class Device:
        compute_capability = "10.0"
        device_kind = "NVIDIA B200"

    assert adapter.capability(Device()) == 100
    Device.compute_capability = "7.5"
    assert adapter.capability(Device()) is None
