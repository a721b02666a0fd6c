"""Loading in chunks, over meshes and through buffers: the same arrays, each byte read once, memory bounded."""

import dataclasses
import functools
import itertools
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_edits import Stored, rewrite, tiny_checkpoint
from flax import nnx
from numerics import assert_same_bits

from k3jax import LoadOptions, MoE, expert_arrays, load_layer, load_layers
from k3jax.checkpoint import Checkpoint, safetensors_file
from k3jax.checkpoint.safetensors_file import SafetensorsFile
from k3jax.expert_stream import as_stored
from pallas_kernels import KernelWeights, MXFP4Array, from_kernel_layout, select
from pallas_kernels.grouped_matmul import kernel_layout
from pallas_kernels.grouped_matmul.kernel_layout import SPANS
from pallas_kernels.grouped_matmul.narrowing import narrow
from sharding import make_mesh

pytestmark = pytest.mark.usefixtures("quickly_compiled")
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "latent_size": 128,
    "expert_width": 128,
    "num_experts": 8,
}
EXPERT = 3 * 128 * 128 * 17 // 32  # bytes of one expert's codes and scales
A_FEW = LoadOptions(host_memory=8 * 2 * EXPERT)  # chunks of two experts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("stream"), **SIZES)


def arrays_of(layer: Any) -> Any:
    return nnx.to_pure_dict(nnx.state(layer))


def assert_same_layers(found: Any, expected: Any) -> None:
    jax.tree.map(assert_same_bits, arrays_of(found), arrays_of(expected))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Every byte range that is read: (file, begin, end)."""
    seen: list[tuple[str, int, int]] = []
    original = SafetensorsFile.read_into

    def spy(self: SafetensorsFile, begin: int, arrays: Any) -> None:
        seen.append((self.path.name, begin, begin + sum(array.nbytes for array in arrays)))
        original(self, begin, arrays)

    monkeypatch.setattr(SafetensorsFile, "read_into", spy)
    return seen


@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 2, 2), (1, 2, 4)])
def test_a_mesh_holds_the_same_arrays_and_reads_no_byte_of_an_expert_twice(
    sizes: tuple[int, int, int], folder: Path, reads: list[tuple[str, int, int]]
) -> None:
    whole = load_layer(folder, 1)
    single = sum(end - begin for _, begin, end in reads)
    reads.clear()
    spread = load_layer(folder, 1, mesh=make_mesh(*sizes), options=A_FEW)
    assert_same_layers(spread, whole)
    assert isinstance(spread, MoE)
    experts = [read for read in reads if read[2] - read[1] >= EXPERT // 8]
    spans = sorted(experts)
    assert sum(end - begin for _, begin, end in reads) <= single + 10_000
    assert all(after[0] != before[0] or after[1] >= before[2] for before, after in itertools.pairwise(spans))
    assert spread.w13.get_value().codes.addressable_shards[0].data.shape == (8 // sizes[1], 2, 128 // sizes[2], 64)
    assert_same_layers(load_layer(folder, 0, mesh=make_mesh(*sizes)), load_layer(folder, 0))


def test_neighbouring_tensors_are_one_read(folder: Path, reads: list[tuple[str, int, int]]) -> None:
    load_layer(folder, 1, options=A_FEW)
    large = [end - begin for _, begin, end in reads]
    assert large.count(2 * EXPERT) == 4


@pytest.mark.parametrize(
    ("recipe", "plain"), [("bf16", None), ("bf16", "BF16"), ("bf16", "F16"), ("w4a16", "F32"), ("w4a16", None)]
)
def test_chunks_join_to_the_same_layer(
    recipe: str, plain: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint(tmp_path, plain_experts=plain, **SIZES)
    told: list[tuple[int, int, str]] = []
    options = LoadOptions(
        quantize_plain=True,
        host_memory=3 * 8 * EXPERT,
        progress=lambda done, total, what: told.append((done, total, what)),
    )
    expected = load_layer(folder, 1, recipe=recipe, options=LoadOptions(quantize_plain=True))
    if plain is None and recipe == "w4a16":  # what a GPU does
        monkeypatch.setattr(expert_arrays, "converter", lambda *_, **__: as_stored)
    assert_same_layers(load_layer(folder, 1, recipe=recipe, options=options), expected)
    assert [done for done, *_ in told] == sorted(done for done, *_ in told)
    assert len(told) >= 3
    assert told[-1][0] == told[-1][1] == told[0][1]


@pytest.fixture
def mosaic_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that says it can run that kernel: experts get its layout, which is not multiplied here."""
    monkeypatch.setattr(select, "why_not_on_gpu", lambda name, _: None if name == "mosaic" else "absent")


def experts_of(layer: Any) -> dict[str, Any]:
    assert isinstance(layer, MoE)
    return {"w13": layer.w13.get_value(), "w2": layer.w2.get_value()}


def as_checkpoints_have_it(w: Any) -> MXFP4Array:
    """The experts out of a kernel's layout, in which ranks may have laid out parts of their width each by itself."""
    assert isinstance(w, KernelWeights)
    w = jax.device_put(w, jax.devices()[0])
    parts = [
        from_kernel_layout(KernelWeights(words, exponents, w.mma, w.gated))
        for words, exponents in zip(
            jnp.split(w.words, w.exponents.size // len(w.words), axis=1 if w.gated else 2),
            w.exponents.reshape(-1, len(w.words)),
            strict=True,
        )
    ]
    if w.gated:
        parts = [jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0], 2, -1, leaf.shape[-1]), part) for part in parts]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=-2 if w.gated else -1), *parts)


@pytest.mark.usefixtures("mosaic_runs")
def test_a_kernel_s_layout_is_made_on_the_way(tmp_path: Path, reads: list[tuple[str, int, int]]) -> None:
    """Of a chunk at a time, each byte read once: devices hold the layer and what one chunk takes, as live arrays."""
    folder = tiny_checkpoint(tmp_path, **SIZES | {"expert_width": 256})
    stored = experts_of(load_layer(folder, 1, implementation="xla"))
    once, most, before = sum(end - begin for _, begin, end in reads), 0, sum(a.nbytes for a in jax.live_arrays())
    reads.clear()

    def tell(*_: Any) -> None:
        nonlocal most
        most = max(most, sum(array.nbytes for array in jax.live_arrays()) - before)

    original = kernel_layout._pack

    def spy(codes: jax.Array, *others: Any, **named: Any) -> Any:
        found = original(codes, *others, **named)
        tell()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_layout, "_pack", spy)
        options = LoadOptions(host_memory=8 * 2 * 2 * EXPERT, progress=tell)  # chunks of two of these experts
        streamed = load_layer(folder, 1, mesh=make_mesh(tensor=2), options=options)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(streamed)))
    assert held < most < held + 3 * 2 * 2 * EXPERT
    assert sum(end - begin for _, begin, end in reads) <= once + 10_000
    for name, w in experts_of(streamed).items():
        jax.tree.map(assert_same_bits, as_checkpoints_have_it(w), stored[name])


def widened(folder: Path, edit: Callable[[np.ndarray], None]) -> Path:
    """A checkpoint in which `edit` has changed the scales of expert 5's w2."""
    path = tiny_checkpoint(folder, **SIZES)

    def widen(tensors: Stored) -> None:
        name = "language_model.model.layers.1.block_sparse_moe.experts.5.w2.weight_scale"
        scales = tensors[name][1].copy()
        edit(scales)
        tensors[name] = ("U8", scales)

    rewrite(path, widen)
    return path


def wide(scales: np.ndarray) -> None:
    scales[0], scales[1] = 250, 1


def one_too_wide_for_e4m3(scales: np.ndarray) -> None:
    scales.flat[0] = scales.max() - 12


@pytest.mark.usefixtures("mosaic_runs")
def test_experts_of_which_some_do_not_fit_the_kernel_stay_as_they_are(tmp_path: Path) -> None:
    folder = widened(tmp_path, wide)
    w2 = experts_of(load_layer(folder, 1, options=A_FEW))["w2"]
    assert isinstance(w2, MXFP4Array)
    jax.tree.map(assert_same_bits, w2, experts_of(load_layer(folder, 1, implementation="xla"))["w2"])


@pytest.mark.usefixtures("mosaic_runs")
def test_they_are_named_by_the_layer_s_numbers_and_rounded_on_the_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Expert 5 is in the third chunk, and on the second of two devices."""
    load = functools.partial(load_layer, widened(tmp_path, wide), 1)
    with pytest.raises(NotImplementedError, match="expert 5: scale bytes from 1 to 250"):
        load(mesh=make_mesh(expert=2), implementation="mosaic", options=A_FEW)
    rounded = experts_of(load(options=dataclasses.replace(A_FEW, allow_inexact=True)))
    assert "the worst, expert 5, by" in caplog.text
    stored = experts_of(load(implementation="xla"))
    jax.tree.map(assert_same_bits, as_checkpoints_have_it(rounded["w13"]), stored["w13"])
    w2 = as_checkpoints_have_it(rounded["w2"])
    jax.tree.map(assert_same_bits, w2[:5], stored["w2"][:5])
    jax.tree.map(assert_same_bits, w2[4:6], narrow(stored["w2"][4:6], span=SPANS["bf16"])[0])


@pytest.mark.usefixtures("mosaic_runs")
def test_chunks_and_devices_multiply_alike(tmp_path: Path) -> None:
    """Expert 5 spans 13 scale bytes: one too many for e4m3 products, which the chunks without it could have."""
    folder = widened(tmp_path, one_too_wide_for_e4m3)
    stored = experts_of(load_layer(folder, 1, implementation="xla"))
    streamed = experts_of(load_layer(folder, 1, recipe="w4a8_fp8", mesh=make_mesh(expert=2), options=A_FEW))
    assert (streamed["w13"].mma, streamed["w2"].mma) == ("e4m3", "bf16")
    for name, w in streamed.items():
        jax.tree.map(assert_same_bits, as_checkpoints_have_it(w), stored[name])


def test_the_host_s_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What NumPy allocates while experts go through buffers: eight chunks, however many there are."""
    monkeypatch.setattr(expert_arrays, "converter", lambda *_, **__: as_stored)
    folder = tiny_checkpoint(tmp_path, latent_size=512, expert_width=512, num_experts=32, hidden_size=32)
    expert = 3 * 512 * 512 * 17 // 32
    peaks = {}
    for experts_a_chunk in (1, 32):
        tracemalloc.start()
        load_layer(folder, 1, options=LoadOptions(host_memory=8 * experts_a_chunk * expert))
        _, peaks[experts_a_chunk] = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert 8 * expert < peaks[1] < 8 * expert + 3_000_000
    assert peaks[32] > 32 * expert  # so the number would show what goes beyond


def test_layers_are_loaded_together(folder: Path) -> None:
    told: list[tuple[int, int, str]] = []
    options = LoadOptions(progress=lambda done, total, what: told.append((done, total, what)))
    dense, moe = load_layers(folder, range(2), recipe="bf16", options=options)
    sizes = [Checkpoint.open(folder).read_layer(layer).nbytes for layer in range(2)]
    assert told[0] == (0, sum(sizes), "layer 0")
    assert (sizes[0], sum(sizes), "layer 1") in told
    assert told[-1] == (sum(sizes), sum(sizes), "layer 1")
    assert_same_layers(dense, load_layer(folder, 0, recipe="bf16"))
    assert_same_layers(moe, load_layer(folder, 1, recipe="bf16"))
    with pytest.raises(ValueError, match="layer=2 does not exist"):
        load_layers(folder, (0, 2))
    assert load_layers(folder, []) == []


def test_experts_in_several_dtypes_are_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, plain_experts="BF16", **SIZES)
    name = "language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight"
    rewrite(folder, lambda tensors: tensors.update({name: ("F32", tensors[name][1].astype(np.float32))}))
    with pytest.raises(NotImplementedError, match=r"experts\.3\.w2 is stored in float32 and other experts"):
        load_layer(folder, 1, recipe="bf16")


def test_an_unreadable_byte_is_an_error_that_names_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(safetensors_file, "_read_at", fail)
    with pytest.raises(OSError, match=r"Input/output error, at byte \d+: .*model-00002"):
        load_layer(folder, 1)
