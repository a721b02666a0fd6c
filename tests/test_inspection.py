"""`k3jax inspect`: what a folder holds, what is wrong with it, and what its weights take on each device of a mesh."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoint_edits import PREFIX, edit_index, rewrite, tiny_checkpoint
from test_tensor_table import DATA, RELEASED_NAMES, release_names
from typer.testing import CliRunner, Result

from k3jax.checkpoint import INDEX
from k3jax.checkpoint.safetensors_writer import NewTensor, write_header
from k3jax.checkpoint.tensor_table import TensorSpec, layer_table, split_name
from k3jax.cli import app
from k3jax.config import K3Config
from k3jax.inspection.console import readable
from k3jax.inspection.memory import model_memory, moe_memory
from k3jax.inspection.summary import Inspection, inspect_checkpoint
from sharding.mesh import MeshSizes

ONE = MeshSizes()
EXPERT_BYTES = 17_547_264  # one of the release's experts, all six tensors


@pytest.fixture(scope="module")
def release() -> K3Config:
    return K3Config.from_pretrained(DATA / "k3-config.json")


def inspect(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def kinds(inspection: Inspection) -> dict[str, tuple[int, dict[str, int], int]]:
    return {kind.name: (kind.count, kind.dtypes, kind.bytes) for kind in inspection.kinds}


def test_a_good_folder(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    found = inspect_checkpoint(folder, ONE)
    assert found.problems.ok
    assert (found.absent, found.dense_layers, found.moe_layers) == ((), (0,), (1,))
    by_kind = kinds(found)
    expert = 3 * 32 * 128 // 2 + 3 * 32 * 128 // 32
    assert by_kind["routed experts"] == (24, {"U8": 24}, 4 * expert)
    assert by_kind["router"] == (2, {"BF16": 1, "F32": 1}, 4 * 96 * 2 + 4 * 4)
    assert by_kind["latent"] == (3, {"BF16": 3}, (2 * 128 * 96 + 128) * 2)
    assert by_kind["shared experts"] == (3, {"BF16": 3}, 3 * 64 * 96 * 2)
    assert by_kind["dense MLP"] == (3, {"BF16": 3}, 3 * 160 * 96 * 2)
    assert by_kind["norm"] == (2, {"BF16": 2}, 2 * 96 * 2)
    packed = found.memory[0]
    assert packed.moe is not None
    assert packed.dense is not None
    held = (packed.moe.routed_experts, packed.moe.router, packed.moe.latent, packed.moe.shared_experts)
    assert held == tuple(by_kind[kind][2] for kind in ("routed experts", "router", "latent", "shared experts"))
    assert packed.total == packed.moe.total + packed.dense.total
    result = inspect(folder, "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    assert "Nothing is missing, nothing is extra" in result.stdout
    values = json.loads((tmp_path / "out.json").read_text())
    assert (values["format"], values["ok"], values["tensors"]) == ("k3jax-inspect-1", True, found.tensors)
    assert values["memory"][0]["total"] == packed.total
    assert values["config"]["activation"] == {"kind": "Situ", "beta": 4.0, "linear_beta": 25.0}


def test_what_is_missing_extra_or_wrong_is_named(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)

    def spoil(tensors: dict) -> None:
        del tensors[f"{PREFIX}experts.2.w1.weight_scale"]
        tensors["model.layers.1.block_sparse_moe.surprise"] = tensors[f"{PREFIX}gate.weight"]
        dtype, codes = tensors[f"{PREFIX}experts.0.w2.weight_packed"]
        tensors[f"{PREFIX}experts.0.w2.weight_packed"] = (dtype, codes[:-1])
        dtype, bias = tensors[f"{PREFIX}gate.e_score_correction_bias"]
        tensors[f"{PREFIX}gate.e_score_correction_bias"] = ("F16", bias.astype("float16"))

    rewrite(folder, spoil)
    problems = inspect_checkpoint(folder, ONE).problems
    assert problems.counts == {"missing": 1, "unknown": 1, "wrong dtype or shape": 2}
    assert problems.examples["missing"] == ("layer 1: block_sparse_moe.experts.2.w1.weight_scale",)
    assert "surprise" in problems.examples["unknown"][0]
    wrong = "\n".join(problems.examples["wrong dtype or shape"])
    assert "is U8 [127, 16], not U8 [128, 16]" in wrong
    assert "is F16 [4], not F32 [4]" in wrong
    result = inspect(folder)
    assert result.exit_code == 1
    assert "missing: 1" in result.stdout
    assert "layer 1: block_sparse_moe.experts.2.w1.weight_scale" in result.stdout


def test_an_index_and_its_shards_may_disagree(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    name = f"{PREFIX}gate.weight"
    edit_index(folder, lambda index: index.update({name: index["language_model.model.layers.0.mlp.up_proj.weight"]}))
    counts = inspect_checkpoint(folder, ONE).problems.counts
    assert counts == {"in the index only": 1}
    edit_index(folder, lambda index: index.pop(name))
    assert inspect_checkpoint(folder, ONE).problems.counts == {"missing": 1, "in a shard only": 1}


def test_absent_shards_are_counted_and_unreadable_ones_named(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    shards = sorted(folder.glob("*.safetensors"))
    shards[0].unlink()
    result = inspect(folder)
    assert result.exit_code == 0
    assert "1 of them not here" in result.stdout
    shards[1].write_bytes(b"garbage")
    broken = inspect(folder)
    assert broken.exit_code == 1
    assert "unreadable shards: 1" in broken.stdout
    assert shards[1].name in broken.stdout


def test_a_long_list_is_cut_and_counted(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    edit_index(folder, lambda index: [index.pop(name) for name in list(index) if ".experts." in name])
    result = inspect(folder)
    assert "missing: 24" in result.stdout
    assert "and 4 more" in result.stdout


def test_a_mistake_is_status_2(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    for arguments, message in (
        ((tmp_path / "nowhere",), "is not a folder"),
        ((folder, "--mesh", "experts=8"), "must be AXIS=SIZE"),
        ((folder, "--mesh", "expert=3"), "expert of size 4 cannot be split evenly over 3 devices"),
        ((folder, "--mesh", "tensor=2"), "MXFP4 needs multiples of 32"),
        ((folder, "--json", tmp_path / "no" / "out.json"), "is not a folder"),
    ):
        result = inspect(*arguments)
        assert result.exit_code == 2, result.output
        assert message in result.stderr


def test_memory_of_the_release(release: K3Config) -> None:
    alone = moe_memory(release, ONE, packed=True)
    assert alone.routed_experts == 896 * EXPERT_BYTES
    assert alone.shared_experts == 3 * 6144 * 7168 * 2
    assert alone.latent == (2 * 3584 * 7168 + 3584) * 2
    assert alone.router == 896 * (7168 * 2 + 4)
    eight = moe_memory(release, MeshSizes(expert=8), packed=True)
    assert eight.routed_experts == 112 * EXPERT_BYTES
    assert eight.shared_experts * 8 == alone.shared_experts
    assert (eight.latent, eight.router) == (alone.latent, alone.router)
    both = moe_memory(release, MeshSizes(data=3, expert=4, tensor=2), packed=True)
    assert both.routed_experts == eight.routed_experts
    whole = model_memory(release, ONE, packed=True)
    assert (whole.dense_layers, whole.moe_layers) == (1, 92)
    assert 1.3e12 < whole.total < 1.5e12
    plain = model_memory(release, ONE, packed=False)
    assert plain.moe is not None
    assert plain.moe.routed_experts == 896 * 3 * 3072 * 3584 * 2
    with pytest.raises(ValueError, match="48 a device"):
        moe_memory(release, MeshSizes(tensor=64), packed=True)


def test_the_whole_release_by_its_index_alone(tmp_path: Path) -> None:
    shutil.copy(DATA / "k3-config.json", tmp_path / "config.json")
    files = {name: f"model-{1 + number % 96:05d}-of-000096.safetensors" for number, name in enumerate(release_names())}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    start = time.process_time()
    found = inspect_checkpoint(tmp_path, MeshSizes(expert=8))
    assert time.process_time() - start < 60  # seconds on a slow machine; what is not linear takes hours
    assert (found.tensors, found.shards, len(found.absent)) == (RELEASED_NAMES, 96, 96)
    assert found.problems.ok
    assert kinds(found)["routed experts"] == (92 * 896 * 6, {}, 0)
    assert sum(kind.count for kind in found.kinds) == RELEASED_NAMES


def test_readable_sizes() -> None:
    assert [readable(size) for size in (0, 999, 1000, 12_345, 17_547_264, 1_560_000_000_000)] == [
        "0 B",
        "999 B",
        "1 kB",
        "12.3 kB",
        "17.5 MB",
        "1.56 TB",
    ]


@pytest.mark.slow
def test_the_whole_release_with_the_headers_of_all_its_shards(tmp_path: Path, release: K3Config) -> None:
    """Every tensor in its dtype and shape, in sparse files of 1.5 TB; in a process of its own, for its memory."""
    shutil.copy(DATA / "k3-config.json", tmp_path / "config.json")
    shards: dict[int, dict[str, str]] = {}
    for name in release_names():
        located = split_name(name)
        layer, suffix = (95, name) if located is None else located
        shards.setdefault(layer, {})[suffix] = name
    files: dict[str, str] = {}
    for layer, names in shards.items():
        specs = layer_table(release, layer, names).specs if layer < release.num_hidden_layers else {}
        there = [(name, specs.get(suffix, TensorSpec(("BF16",), (8,)))) for suffix, name in names.items()]
        tensors = [NewTensor(name, spec.dtypes[0], spec.shape) for name, spec in there]
        tensors.sort(key=lambda tensor: ("F32", "BF16", "U8").index(tensor.dtype))
        file_name = f"model-{layer + 1:05d}-of-000096.safetensors"
        with (tmp_path / file_name).open("xb") as file:
            write_header(file, tensors, {})
            file.truncate(file.tell() + sum(tensor.nbytes for tensor in tensors))
        files |= dict.fromkeys(names.values(), file_name)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    assert len(files) == RELEASED_NAMES
    program = """
import sys, time
from pathlib import Path
from k3jax.cli import main
sys.argv = ["k3jax", "inspect", sys.argv[1]]
try:
    main()
except SystemExit as ended:
    # Not `ru_maxrss`, which begins at what the process that started this one had.
    (peak,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    print(ended.code, time.process_time(), int(peak.split()[1]) * 1024)
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(tmp_path / "compiled")
    for folder in (tiny_checkpoint(tmp_path), tmp_path):  # The first run compiles what it imports, once for all.
        command = [sys.executable, "-c", program, str(folder)]
        run = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1], env=environment
        )
    assert "Nothing is missing, nothing is extra" in run.stdout
    code, seconds, peak = run.stdout.splitlines()[-1].split()
    print(f"{seconds} s, {int(peak) / 1e6:.0f} MB")
    assert code == "0"
    assert float(seconds) < 10  # of processor time
    assert int(peak) < 1e9
