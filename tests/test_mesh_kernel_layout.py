"""Experts in the Hopper kernel's layout over a mesh: each device lays out its own part, or none does."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotations import unchecked_annotations
from layers import checkpoint_tensors, random_arrays, random_tokens, small_config
from numerics import assert_same_bits, relative_l2

from k3jax import LoadOptions, MoE, MoEArrays
from k3jax.compare.tolerances import limits
from k3jax.kernel_placement import stored_expert
from k3jax.reference import oracle_trace
from pallas_kernels import KernelWeights, MXFP4Array
from sharding import make_mesh

pytestmark = pytest.mark.usefixtures("quickly_compiled")
CONFIG = small_config(
    hidden_size=128, routed_expert_hidden_size=256, moe_intermediate_size=256, num_experts=4, num_experts_per_token=2
)
LAYOUTS: Any = {"ep2-tp2": ((1, 2, 2), "replicated"), "dp2-ep2-sharded": ((2, 2, 1), "sharded")}


def layer(arrays: MoEArrays, implementation: str, name: str) -> MoE:
    sizes, tokens = LAYOUTS[name]
    return MoE(
        CONFIG,
        recipe="w4a16",
        implementation=implementation,
        arrays=arrays,
        mesh=make_mesh(*sizes),
        tokens=tokens,
    )


@pytest.mark.usefixtures("hopper")
def test_every_device_lays_out_its_part() -> None:
    arrays = random_arrays(CONFIG, "w4a16")
    mosaic = layer(arrays, "mosaic", "ep2-tp2")
    w13, w2 = mosaic.w13.get_value(), mosaic.w2.get_value()
    assert isinstance(w13, KernelWeights)
    assert isinstance(w2, KernelWeights)
    assert (w13.shape, w2.shape) == ((4, 512, 256), (4, 256, 256))
    assert {shard.data.nbytes for shard in w13.words.addressable_shards} == {w13.words.nbytes // 4}
    x = random_tokens((12, 128))
    truth = oracle_trace(CONFIG, checkpoint_tensors(arrays), np.asarray(x), recipe="w4a16")["output"]
    assert relative_l2(jax.jit(lambda layer, x: layer(x))(mosaic, x), truth) < limits("oracle", "w4a16").relative_l2
    for found, expected in ((w13, arrays.w13), (w2, arrays.w2)):
        assert isinstance(expected, MXFP4Array)
        for expert in (0, 3):
            back = stored_expert(found, expert)
            assert_same_bits(back.codes, expected.codes[expert])
            assert_same_bits(back.scales, expected.scales[expert])


@pytest.mark.usefixtures("hopper")
def test_one_device_that_cannot_keeps_all_from_it() -> None:
    """Expert 3 spans more exponents than the kernel holds."""
    arrays = random_arrays(CONFIG, "w4a16")
    assert isinstance(arrays.w2, MXFP4Array)
    wide = MXFP4Array(arrays.w2.codes, (arrays.w2.scales + 60).at[3, 3, 1].set(0))
    arrays = dataclasses.replace(arrays, w2=wide)
    with pytest.raises(NotImplementedError, match="expert 3:"):  # the second of the second rank
        layer(arrays, "mosaic", "ep2-tp2")
    mesh = make_mesh(expert=2)
    assert isinstance(MoE(CONFIG, recipe="w4a16", arrays=arrays, mesh=mesh).w2.get_value(), MXFP4Array)
    rounded = MoE(CONFIG, recipe="w4a16", arrays=arrays, mesh=mesh, options=LoadOptions(allow_inexact=True))
    assert isinstance(rounded.w2.get_value(), KernelWeights)


@pytest.mark.usefixtures("hopper")
def test_all_devices_multiply_alike() -> None:
    """Expert 3 spans 13 scale bytes: one too many for e4m3 products, which the other devices' experts could have."""
    arrays = random_arrays(CONFIG, "w4a8_fp8")
    assert isinstance(arrays.w2, MXFP4Array)
    wide = MXFP4Array(arrays.w2.codes, arrays.w2.scales.at[3, 3, 1].set(int(arrays.w2.scales[3].max()) - 12))
    mesh = make_mesh(expert=2)
    moe = MoE(CONFIG, recipe="w4a8_fp8", arrays=dataclasses.replace(arrays, w2=wide), mesh=mesh)
    w13, w2 = moe.w13.get_value(), moe.w2.get_value()
    assert isinstance(w13, KernelWeights)
    assert isinstance(w2, KernelWeights)
    assert (w13.mma, w2.mma) == ("e4m3", "bf16")
    for expert in (0, 3):
        assert_same_bits(stored_expert(w2, expert).scales, wide.scales[expert])


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", LAYOUTS)
def test_shapes_alone_are_laid_out_alike(name: str) -> None:
    arrays = random_arrays(CONFIG, "w4a16")
    with unchecked_annotations():
        shapes = layer(MoEArrays.abstract(CONFIG, packed=True), "mosaic", name)
    for ours, theirs in zip(jax.tree.leaves(shapes), jax.tree.leaves(layer(arrays, "mosaic", name)), strict=True):
        assert isinstance(ours, jax.ShapeDtypeStruct)
        assert (ours.shape, ours.dtype, ours.sharding) == (theirs.shape, theirs.dtype, theirs.sharding)
    assert shapes.w13.get_value().words.dtype == jnp.uint32
