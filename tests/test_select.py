"""A named implementation runs or raises, None always works, and the choice is visible."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import (
    Situ,
    dense_matmul,
    explain,
    grouped_matmul,
    lay_out,
    quantize_fp8_token,
    quantize_mxfp4,
    quantize_mxfp8,
    select,
    situ_and_mul,
    swiglu_and_mul,
    triton_call,
)
from pallas_kernels.select import IMPLEMENTATIONS, choose

ROW_OPS = ("situ_and_mul", "swiglu_and_mul", "quantize_mxfp8", "quantize_fp8_token")
OPS = ("grouped_matmul", "dense_matmul", *ROW_OPS)


@pytest.mark.parametrize("op", OPS)
def test_every_op_explains_what_runs_and_why_each_other_does_not(op: str) -> None:
    free = explain(op)
    assert {free.chosen, *free.others} == set(IMPLEMENTATIONS)
    assert free.chosen not in free.others
    assert all(free.others.values())
    assert str(free).splitlines()[0] == f"{op}: {free.chosen} runs"
    assert len(str(free).splitlines()) == len(IMPLEMENTATIONS)
    named = explain(op, implementation="reference")
    assert named.chosen == "reference"
    assert "reference was asked for" in named.others[free.chosen]


@pytest.mark.parametrize("op", OPS)
def test_fault_6_a_named_implementation_is_never_replaced(op: str) -> None:
    free = explain(op)
    for name in IMPLEMENTATIONS:
        if name == free.chosen or "can run" in free.others[name]:
            assert explain(op, implementation=name).chosen == name
        else:
            with pytest.raises(NotImplementedError, match=f"'{name}': .*; pass {free.chosen} or"):
                explain(op, implementation=name)
    with pytest.raises(ValueError, match="implementation='cutlass' is not one of reference, xla, triton, mosaic"):
        explain(op, implementation="cutlass")


def test_every_op_asks_before_it_computes() -> None:
    x, sizes = jnp.ones((2, 64), jnp.bfloat16), jnp.array([2], jnp.int32)
    calls = (
        lambda name: grouped_matmul(x, jnp.ones((1, 64, 64), jnp.bfloat16), sizes, implementation=name),
        lambda name: dense_matmul(x, jnp.ones((64, 64), jnp.bfloat16), implementation=name),
        lambda name: situ_and_mul(x, beta=4.0, linear_beta=25.0, implementation=name),
        lambda name: swiglu_and_mul(x, implementation=name),
        lambda name: quantize_mxfp8(x, implementation=name),
        lambda name: quantize_fp8_token(x, implementation=name),
    )
    for call in calls:
        for name in (None, "reference", "xla"):
            call(name)
        with pytest.raises(ValueError, match="implementation='fastest'"):
            call("fastest")


@pytest.mark.parametrize("op", ROW_OPS)
def test_on_hopper_bfloat16_rows_get_the_kernel_and_others_xla(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "why_not_on_gpu", lambda name, _: None if name == "mosaic" else "absent")
    assert explain(op).chosen == "mosaic"
    assert explain(op, x=jax.ShapeDtypeStruct((2, 64), jnp.bfloat16)).chosen == "mosaic"
    for x, reason in (
        (jax.ShapeDtypeStruct((2, 64), jnp.float32), "x is float32, and the kernel takes bfloat16"),
        (jax.ShapeDtypeStruct((2, 36), jnp.bfloat16), r"x has shape \(2, 36\), .* rows of a multiple of"),
        (jax.ShapeDtypeStruct((0, 64), jnp.bfloat16), r"x has shape \(0, 64\), .* at least one"),
        (jax.ShapeDtypeStruct((1 << 20, 16384), jnp.bfloat16), ".* (longer|more) than"),
    ):
        assert explain(op, x=x).chosen == "xla"
        with pytest.raises(NotImplementedError, match=f"'mosaic': {reason}"):
            explain(op, implementation="mosaic", x=x)


def test_on_hopper_orders_get_the_kernel_up_to_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "why_not_on_gpu", lambda name, _: None if name == "mosaic" else "absent")
    ids, scores = jax.ShapeDtypeStruct((8192, 16), jnp.int32), jax.ShapeDtypeStruct((2, 1024), jnp.float32)
    for op, x, count in (("schedule_rows", ids, 255), ("stable_top_k", scores, None), ("top_k_weights", scores, None)):
        assert explain(op).chosen == explain(op, x=x, groups=count).chosen == "mosaic"
    for groups, reason in ((0, "no group"), (256, "131072 slots of 256 groups are more than")):
        explained = explain("schedule_rows", x=ids, groups=groups)
        assert explained.chosen == "xla"
        assert reason in explained.others["mosaic"]
    for scores, reason in (
        (jax.ShapeDtypeStruct((2, 1025), jnp.float32), "rows of 1025 are longer than"),
        (jax.ShapeDtypeStruct((2, 8), jnp.bfloat16), "values are bfloat16"),
        (jax.ShapeDtypeStruct((1 << 21, 1024), jnp.float32), "more than 1073741824 elements"),
    ):
        for op in ("stable_top_k", "top_k_weights"):
            explained = explain(op, x=scores)
            assert explained.chosen == "xla"
            assert reason in explained.others["mosaic"]


def test_on_hopper_few_slots_are_ordered_and_spread_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "why_not_on_gpu", lambda name, _: None if name == "mosaic" else "absent")
    few, many = (jax.ShapeDtypeStruct((tokens, 16), jnp.int32) for tokens in (128, 129))
    x, wide = (jax.ShapeDtypeStruct((64, columns), jnp.bfloat16) for columns in (3584, 8224))
    taken: dict[str, Any] = {"x": x, "ids": few, "groups": 896}
    for explained in (explain("spread_rows"), explain("spread_rows", **taken)):
        assert explained.chosen == "mosaic"
        assert explained.others["triton"] == "spread_rows has no such kernel"
    for changed, reason in (
        ({"ids": many}, "2064 slots are more than the 2048"),
        ({"groups": 0}, "no group"),
        ({"groups": 1 << 15}, "more than 33554432 comparisons"),
        ({"x": jax.ShapeDtypeStruct((64, 3584), jnp.float32)}, "x is float32"),
        ({"x": jax.ShapeDtypeStruct((64, 3592), jnp.bfloat16)}, "rows of a multiple of 32"),
        ({"x": wide}, "up to 8192"),
    ):
        explained = explain("spread_rows", **{**taken, **changed})
        assert explained.chosen == "xla"
        assert reason in explained.others["mosaic"]


def test_on_hopper_bfloat16_weights_get_mosaic_only_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class H200:
        compute_capability, device_kind = "9.0", "NVIDIA H200"

    x, w = jnp.ones((2, 128), jnp.bfloat16), jnp.ones((1, 96, 128), jnp.bfloat16)
    quantised = quantize_mxfp8(x)
    monkeypatch.setattr(jax, "devices", lambda: [H200()])
    for able, first in ((None, "triton"), ("absent", "xla")):
        monkeypatch.setattr(triton_call, "why_not", lambda able=able: able)
        free = explain("grouped_matmul", x=x, w=w)
        assert free.chosen == first
        assert free.others["mosaic"] == f"can run where it is named: it was never timed; {first} comes first"
    assert explain("dense_matmul", x=x, w=w[0]).chosen == "mosaic"  # as which it was timed
    asked = explain("grouped_matmul", x=x, w=w, implementation="mosaic")
    assert asked.chosen == "mosaic"
    assert "DenseTuning" in str(asked)
    assert asked.others["xla"] == "can run; mosaic was asked for"
    narrow = jnp.ones((1, 8, 128), jnp.bfloat16)  # 4 columns of gate and 4 of up
    assert explain("grouped_matmul", x=x, w=narrow, implementation="mosaic").chosen == "mosaic"
    for cannot, reason in (
        ({"w": narrow, "activation": Situ(4.0, 25.0)}, "N must be a multiple of 16"),
        ({"x": x[:, :96], "w": w[:, :, :96]}, "K of 64"),
        ({"x": quantised}, "bfloat16 weights cannot take MXFP8Array"),
    ):
        with pytest.raises(NotImplementedError, match=f"'mosaic': .*{reason}"):
            explain("grouped_matmul", **{"x": x, "w": w, **cannot}, implementation="mosaic")


def test_on_blackwell_mosaic_has_bfloat16_rows_and_triton_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = jnp.ones((2, 128), jnp.bfloat16)
    quantised = quantize_mxfp8(rows)
    w = quantize_mxfp4(jnp.ones((1, 128, 128)))

    class B200:
        compute_capability, device_kind, core_count = "10.0", "NVIDIA B200", 148

    monkeypatch.setattr(jax, "devices", lambda: [B200()])
    monkeypatch.setattr(triton_call, "why_not", lambda: None)
    laid_out = lay_out(w, recipe="w4a16", gated=False)
    assert explain("grouped_matmul", x=rows, w=laid_out).chosen == "mosaic"
    assert "BlackwellTuning" in str(explain("grouped_matmul", x=rows, w=laid_out))
    for op in ROW_OPS:
        assert explain(op, x=rows).chosen == "mosaic"
    for recipe in ("w4a8", "w4a8_fp8"):
        assert lay_out(w, recipe=recipe, gated=False) is w
        with pytest.raises(NotImplementedError, match=f"on this device it has w4a16, not {recipe}"):
            lay_out(w, recipe=recipe, gated=False, implementation="mosaic")
    explained = explain("grouped_matmul", x=quantised, w=w)
    assert explained.chosen == "triton"
    assert explained.others["mosaic"] == "on this device it has w4a16, not w4a8"
    dense = explain("dense_matmul", x=rows, w=jnp.ones((128, 128), jnp.bfloat16))
    assert dense.chosen == "xla"
    assert dense.others["mosaic"] == "on this device it has w4a16, not bf16"
    small = quantize_mxfp4(jnp.ones((1, 64, 128)))  # half a slab
    assert lay_out(small, recipe="w4a16", gated=False) is small


def test_unknown_ops_raise_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="op='softmax' is not one of grouped_matmul"):
        explain("softmax")


def test_a_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    select._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        assert choose("grouped_matmul", None) == choose("grouped_matmul", None)
        choose("grouped_matmul", "reference")
    assert [record.getMessage() for record in caplog.records] == [
        f"grouped_matmul runs on implementation {explain('grouped_matmul').chosen!r}",
        "grouped_matmul runs on implementation 'reference'",
    ]
