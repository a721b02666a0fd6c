"""A checkpoint folder whose files lie: paths and links that lead outside; shards missing, cut or misplaced."""

import shutil
from pathlib import Path

import pytest
from checkpoint_edits import PREFIX, edit_index, edit_json, tiny_checkpoint

from k3jax.checkpoint import CONFIG, INDEX, SINGLE, Checkpoint

EXPERT = f"{PREFIX}experts.2.w3.weight_packed"
GATE = f"{PREFIX}gate.weight"
MOE_SHARD = "model-00002-of-000003.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "place",
    [
        "/etc/x.safetensors",
        "../x.safetensors",
        "a/../../x.safetensors",
        "C:x.safetensors",
        "C:\\x.safetensors",
        "..\\x.safetensors",
        "\\\\host\\x.safetensors",
        "x.bin",
        "",
        "x\0.safetensors",
    ],
)
def test_an_index_may_not_point_outside(place: str, folder: Path) -> None:
    edit_index(folder, lambda weight_map: weight_map.update({GATE: place}))
    with pytest.raises(ValueError, match=r"is not the name of a \.safetensors file in this folder"):
        Checkpoint.open(folder)


def test_links_may_not_lead_outside(folder: Path, tmp_path: Path) -> None:
    shutil.move(folder / MOE_SHARD, tmp_path / "elsewhere.safetensors")
    (folder / MOE_SHARD).symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(ValueError, match=r"is a link to .*elsewhere\.safetensors"):
        Checkpoint.open(folder).read_layer(1)


@pytest.mark.parametrize("name", [CONFIG, INDEX])
def test_config_and_index_may_not_be_links_outside(name: str, folder: Path, tmp_path: Path) -> None:
    shutil.move(folder / name, tmp_path / "elsewhere.json")
    (folder / name).symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ValueError, match=r"is a link to .*elsewhere\.json"):
        Checkpoint.open(folder)


def test_links_within_the_folder_and_to_the_folder(folder: Path, tmp_path: Path) -> None:
    (folder / MOE_SHARD).rename(folder / "real.safetensors")
    (folder / MOE_SHARD).symlink_to("real.safetensors")
    (tmp_path / "link").symlink_to(folder)
    assert Checkpoint.open(tmp_path / "link").read_layer(1)


def test_the_hugging_face_cache_layout(folder: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "models--someone--k3" / "blobs"
    snapshot = blobs.parent / "snapshots" / "0123abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.copy(path, blobs / f"blob{number}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"blob{number}")
    assert len(Checkpoint.open(snapshot).read_layer(1)) == 8 + 6 * 4
    (snapshot / MOE_SHARD).unlink()
    (snapshot / MOE_SHARD).symlink_to(folder / MOE_SHARD)
    with pytest.raises(ValueError, match="outside the checkpoint's folder"):
        Checkpoint.open(snapshot).read_layer(1)


def test_a_shard_that_is_missing(folder: Path) -> None:
    (folder / MOE_SHARD).unlink()
    with pytest.raises(FileNotFoundError, match=f"{MOE_SHARD} does not exist"):
        Checkpoint.open(folder).read_layer(1)


def test_a_shard_that_is_truncated(folder: Path) -> None:
    content = (folder / MOE_SHARD).read_bytes()
    (folder / MOE_SHARD).write_bytes(content[:-100])
    with pytest.raises(ValueError, match=f"{MOE_SHARD}: tensor .* truncated"):
        Checkpoint.open(folder).read_layer(1)
    (folder / MOE_SHARD).write_bytes(content[:50])
    with pytest.raises(ValueError, match=f"{MOE_SHARD} is truncated"):
        Checkpoint.open(folder).read_layer(1)


def test_a_tensor_that_the_index_misplaces(folder: Path) -> None:
    edit_index(folder, lambda weight_map: weight_map.update({EXPERT: "model-00001-of-000003.safetensors"}))
    with pytest.raises(ValueError, match=r"model-00001-of-000003.safetensors lacks tensor '.*experts\.2\.w3"):
        Checkpoint.open(folder).read_layer(1)


def test_a_tensor_that_two_shards_hold(folder: Path) -> None:
    (folder / "copy.safetensors").write_bytes((folder / MOE_SHARD).read_bytes())
    edit_index(folder, lambda weight_map: weight_map.update({EXPERT: "copy.safetensors"}))
    with pytest.raises(ValueError, match=r"holds tensor .*, which the index places in"):
        Checkpoint.open(folder).read_layer(1)


def test_a_tensor_that_the_index_forgets_is_missing(folder: Path) -> None:
    edit_index(folder, lambda weight_map: weight_map.pop(EXPERT))
    with pytest.raises(ValueError, match=r"missing '.*experts\.2\.w3\.weight_packed'"):
        Checkpoint.open(folder).read_layer(1)


def test_a_folder_that_is_no_checkpoint(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        Checkpoint.open(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        Checkpoint.open(folder / MOE_SHARD)
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        Checkpoint.open(tmp_path)
    (folder / INDEX).unlink()
    with pytest.raises(FileNotFoundError, match="neither"):
        Checkpoint.open(folder)


def test_an_index_and_a_single_file_contradict(folder: Path) -> None:
    shutil.copy(folder / MOE_SHARD, folder / SINGLE)
    with pytest.raises(ValueError, match="both"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "weight_map must be an object"),
        ('{"weight_map": ["a"]}', "weight_map must be an object"),
        ('{"weight_map": {"a": 1}}', "weight_map must be an object"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' appears twice"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_malformed_index(text: str, message: str, folder: Path) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        Checkpoint.open(folder)
    assert INDEX in str(caught.value)


def test_an_index_that_is_a_folder(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / INDEX).mkdir()
    with pytest.raises(ValueError, match="not a regular file"):
        Checkpoint.open(folder)


def test_a_config_without_activation_says_so(folder: Path) -> None:
    edit_json(folder / CONFIG, lambda config: config["text_config"].pop("hidden_act"))
    with pytest.raises(ValueError, match="hidden_act is missing"):
        Checkpoint.open(folder)
