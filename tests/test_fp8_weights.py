"""Dense weights in e4m3 by blocks of 128 x 128: the format against float64, layers against the oracle."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from annotations import unchecked_annotations
from checkpoint_edits import tiny_checkpoint
from flax import nnx
from numerics import assert_same_bits, relative_l2

from k3jax import GatedMLP, LoadOptions, MoE, load_layer
from k3jax.checkpoint import Checkpoint
from k3jax.compare import compare_layer
from k3jax.compare.run import unit_normal
from k3jax.convert import run
from k3jax.linear import FrozenWeight
from k3jax.reference.formats import through_fp8_block
from k3jax.saving import save_layer
from pallas_kernels import FP8BlockArray, quantize_fp8_block
from sharding import make_mesh

FP8 = LoadOptions(dense_weights="fp8")
SEED = 11


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Widths that blocks do not divide, but for the one that a mesh of four splits: 2 x 256 = 4 x 128."""
    sizes: dict[str, Any] = {"hidden_size": 200, "latent_size": 96, "intermediate_size": 512, "expert_width": 256}
    return tiny_checkpoint(tmp_path_factory.mktemp("fp8"), num_experts=4, **sizes)


def values_of(w: FP8BlockArray) -> np.ndarray:
    """float64, by the definition."""
    rows, columns = w.shape
    scales = np.repeat(np.repeat(np.asarray(w.scales, np.float64), 128, 0)[:rows], 128, 1)[:, :columns]
    return np.asarray(w.values).astype(np.float64) * scales


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (1, 1), (130, 257), (127, 300)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_the_nearest_values_by_block(shape: tuple[int, int], dtype: Any) -> None:
    rng = np.random.default_rng(SEED)
    magnitudes = np.exp2(rng.integers(-30, 30, shape))  # so that small values of a block are subnormal in e4m3
    x = jnp.asarray(rng.standard_normal(shape) * magnitudes, dtype)
    w = quantize_fp8_block(x)
    expected = through_fp8_block(np.asarray(x).astype(np.float64))
    np.testing.assert_array_equal(values_of(w), expected)
    assert_same_bits(w.dequantize(), expected.astype(np.float32).astype(ml_dtypes.bfloat16))
    exponents = np.log2(np.asarray(w.scales))
    np.testing.assert_array_equal(exponents, np.rint(exponents))


def test_edges_of_the_range() -> None:
    """Exact boundaries of the scale, zeros, the smallest and largest numbers, and a block with an infinity."""
    for amax in (1.75, 3.5, 447.0, 448.0, 449.0, 1e-38, 6e-39, 3e38, 2.0**-120, 0.0):
        x = np.zeros((128, 256), np.float32)
        x[5, 7], x[6, 8], x[0, 200] = amax, -amax / 3, 1.0
        w = quantize_fp8_block(jnp.asarray(x))
        np.testing.assert_array_equal(values_of(w), through_fp8_block(x.astype(np.float64)), err_msg=str(amax))
        assert np.isfinite(np.asarray(w.dequantize()).astype(np.float64)).all()
    x[3, 3] = np.inf
    poisoned = np.asarray(quantize_fp8_block(jnp.asarray(x)).dequantize())
    assert np.isnan(poisoned[:, :128]).all()
    assert poisoned[0, 200] == 1


def test_leading_axes_and_wrong_arrays() -> None:
    x = jax.random.normal(jax.random.key(SEED), (2, 150, 130))
    stacked = quantize_fp8_block(x)
    assert stacked.scales.shape == (2, 2, 2)
    for index in range(2):
        assert_same_bits(stacked.values[index], quantize_fp8_block(x[index]).values)
    with pytest.raises(ValueError, match=r"need scales \(2, 2, 2\), not \(2, 2, 1\)"):
        FP8BlockArray(stacked.values, stacked.scales[..., :1])
    with pytest.raises(ValueError, match="must be float8_e4m3fn"):
        FP8BlockArray(x, stacked.scales)
    with unchecked_annotations(), pytest.raises(ValueError, match="takes a floating-point array"):
        quantize_fp8_block(x[0, 0])


@pytest.mark.parametrize("index", [0, 1])
def test_layers_are_what_the_oracle_says_and_the_check_sees_bf16(index: int, folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    config, tensors = checkpoint.config, checkpoint.read_layer(index)
    x = unit_normal(24, config.hidden_size, SEED)
    layers = [load_layer(folder, index, options=options) for options in (FP8, LoadOptions())]
    oracle, told = (
        compare_layer(layer, config, tensors, x, index=index, recipe="w4a16", dense_weights="fp8") for layer in layers
    )
    assert oracle.ok, oracle.first_divergence
    first = told.first_divergence
    assert first is not None
    assert first.stage == ("output" if index == 0 else "latent")
    assert compare_layer(
        layers[0], config, tensors, x, index=index, recipe="w4a16", against="exact", dense_weights="fp8"
    ).ok


def test_what_is_kept_in_fp8(folder: Path) -> None:
    moe, plain = load_layer(folder, 1, options=FP8), load_layer(folder, 1)
    assert isinstance(moe, MoE)
    assert isinstance(plain, MoE)
    assert moe.shared is not None
    frozen = (moe.latent_down, moe.latent_up, moe.shared.gate_up, moe.shared.down)
    assert all(isinstance(variable, FrozenWeight) for variable in frozen)
    assert_same_bits(moe.router.weight[...], plain.router.weight[...])
    assert moe.router.weight[...].dtype == jnp.bfloat16

    def size(variables: Any) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(variables))

    assert plain.shared is not None
    ours, theirs = size(frozen), size((plain.latent_down, plain.latent_up, plain.shared.gate_up, plain.shared.down))
    assert theirs / 2 < ours < theirs / 2 * 1.01


def test_gradients_reach_the_tokens_and_nothing_else(folder: Path) -> None:
    layer = load_layer(folder, 0, options=FP8)
    x = jax.random.normal(jax.random.key(1), (3, 200))
    gradient = jax.grad(lambda x: layer(x).sum())(x)
    assert bool(jnp.all(jnp.isfinite(gradient)))
    assert float(jnp.abs(gradient).max()) > 0
    assert nnx.to_pure_dict(nnx.state(layer, nnx.Param)) == {}


def test_over_a_mesh(folder: Path) -> None:
    x = jax.random.normal(jax.random.key(2), (8, 200), jnp.bfloat16)
    whole, spread = (load_layer(folder, 0, options=FP8, mesh=mesh) for mesh in (None, make_mesh(expert=4)))
    assert relative_l2(spread(x), whole(x)) < 4e-3
    spread = load_layer(folder, 1, options=FP8, mesh=make_mesh(expert=4))
    for ours, theirs in zip(
        jax.tree.leaves(nnx.state(spread)), jax.tree.leaves(nnx.state(load_layer(folder, 1, options=FP8))), strict=True
    ):
        assert_same_bits(ours, theirs)
    with pytest.raises(NotImplementedError, match="a width of 512 over 8 devices cuts blocks of 128 in two"):
        load_layer(folder, 1, options=FP8, mesh=make_mesh(expert=4, tensor=2))


def test_converted_and_saved(folder: Path, tmp_path: Path) -> None:
    run.convert(run.Request(source=folder, target=tmp_path / "out", options=FP8))
    found, expected = load_layer(tmp_path / "out", 1, options=FP8), load_layer(folder, 1, options=FP8)
    for ours, theirs in zip(jax.tree.leaves(nnx.state(found)), jax.tree.leaves(nnx.state(expected)), strict=True):
        assert_same_bits(ours, theirs)
    assert isinstance(load_layer(tmp_path / "out", 0, options=FP8), GatedMLP)
    with pytest.raises(ValueError, match="keeps dense weights in fp8"):
        load_layer(tmp_path / "out", 1)
    with pytest.raises(NotImplementedError, match="no longer has those of its checkpoint"):
        save_layer(expected, tmp_path / "saved", index=1, source=folder)
    with pytest.raises(ValueError, match="dense_weights='int8' is not one of bf16, fp8"):
        LoadOptions(dense_weights="int8")
