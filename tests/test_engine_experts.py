"""Experts saved in vLLM's, TRT-LLM's and DeepGEMM's order come back as the release's, or not at all."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoint_edits import tiny_checkpoint

from k3jax.checkpoint import Checkpoint
from k3jax.checkpoint.engine_experts import LAYOUTS, experts_digest, release_experts
from k3jax.checkpoint.safetensors_writer import write_safetensors

EXPERTS, WIDTH = 4, 32
STEM = "block_sparse_moe.experts."
SCRIPT = Path(__file__).parents[1] / "scripts" / "import_experts.py"
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def tensors(folder: Path) -> Arrays:
    return {name: tensor for name, tensor in Checkpoint.open(folder).read_layer(1).items() if name.startswith(STEM)}


def saved(tensors: Arrays, layout: str) -> Arrays:
    """What an engine holds, row by row from the layout's definition."""
    arrays = {}
    for kind, suffix in (("weight", "weight_packed"), ("weight_scale", "weight_scale")):
        w1, w2, w3 = (
            np.stack([tensors[f"{STEM}{e}.{w}.{suffix}"] for e in range(EXPERTS)]) for w in ("w1", "w2", "w3")
        )
        rows = {"vllm": [], "trtllm": [], "deepgemm": []}  # type: dict[str, list[np.ndarray]]
        rows["vllm"] = [w1[:, i] for i in range(WIDTH)] + [w3[:, i] for i in range(WIDTH)]
        rows["trtllm"] = [w3[:, i] for i in range(WIDTH)] + [w1[:, i] for i in range(WIDTH)]
        for start in range(0, WIDTH, 8):
            rows["deepgemm"] += [w[:, i] for w in (w1, w3) for i in range(start, start + 8)]
        arrays[f"w13_{kind}"], arrays[f"w2_{kind}"] = np.stack(rows[layout], axis=1), w2
    return arrays


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_comes_back_and_every_other_name_for_it_is_refused(layout: str, tensors: Arrays) -> None:
    digest, arrays = experts_digest(tensors), saved(tensors, layout)
    found = release_experts(arrays, layout=layout, digest=digest)
    assert found.keys() == tensors.keys()
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor, tensors[name])
    for other in set(LAYOUTS) - {layout}:
        with pytest.raises(ValueError, match=f"not in {other}'s order"):
            release_experts(arrays, layout=other, digest=digest)


def test_the_digest_is_of_values_not_of_bytes(tensors: Arrays) -> None:
    digest = experts_digest(tensors)
    name = f"{STEM}2.w3"
    other = dict(tensors)
    codes, scales = tensors[f"{name}.weight_packed"].copy(), tensors[f"{name}.weight_scale"].copy()
    codes[0, :16], scales[0, 0] = 0x24, 127  # 2 and 1, thirty-two of them
    other |= {f"{name}.weight_packed": codes, f"{name}.weight_scale": scales}
    first = experts_digest(other)
    assert first != digest
    codes[0, :16], scales[0, 0] = 0x46, 126  # the same as 4 and 2, halved
    assert experts_digest(other) == first
    codes[1, 0] = codes[1, 0] & 0xF0
    zero = experts_digest(other)
    codes[1, 0] |= 0x08  # minus zero
    assert experts_digest(other) == zero


def test_arrays_that_do_not_belong_together(tensors: Arrays) -> None:
    arrays, digest = saved(tensors, "vllm"), experts_digest(tensors)
    with pytest.raises(ValueError, match="layout='sglang' is not one of vllm, trtllm, deepgemm"):
        release_experts(arrays, layout="sglang", digest=digest)
    with pytest.raises(ValueError, match="w2_weight_scale is missing"):
        release_experts({k: v for k, v in arrays.items() if k != "w2_weight_scale"}, layout="vllm", digest=digest)
    with pytest.raises(ValueError, match=r"w2_weight has shape .* asks for \(4, 128, 16\)"):
        release_experts(arrays | {"w2_weight": arrays["w2_weight"][:, :-1]}, layout="vllm", digest=digest)


def test_the_script(folder: Path, tensors: Arrays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_safetensors(tmp_path / "e.safetensors", {k: ("U8", v) for k, v in saved(tensors, "trtllm").items()})
    arguments = [folder, tmp_path / "e.safetensors", tmp_path / "out", "--layout", "trtllm"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments), "--digest", experts_digest(tensors)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert not ended.value.code
    for name, tensor in Checkpoint.open(tmp_path / "out").read_layer(1).items():
        np.testing.assert_array_equal(tensor, Checkpoint.open(folder).read_layer(1)[name])
