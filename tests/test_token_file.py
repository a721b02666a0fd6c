"""Token files: the three forms, read as written, and what is wrong with others in words."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from k3jax.checkpoint.safetensors_writer import write_safetensors
from k3jax.evaluation.tokens import TokenFile

Named = dict[str, tuple[str, np.ndarray]]


def rows(count: int, dtype: Any = np.float32, width: int = 8) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, width)).astype(dtype)


def safetensors(folder: Path, tensors: Named) -> Path:
    path = folder / "tokens.safetensors"
    path.unlink(missing_ok=True)
    write_safetensors(path, tensors)
    return path


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ">f4"])
def test_an_npy_file_is_every_layer_s_input(tmp_path: Path, dtype: Any) -> None:
    np.save(tmp_path / "tokens.npy", rows(5, dtype))
    file = TokenFile.open(tmp_path / "tokens.npy", 8)
    assert file.layers == ()
    np.testing.assert_array_equal(file.of_layer(3).read(0, 5), rows(5, dtype))


def test_one_tensor_is_every_layer_s_input(tmp_path: Path) -> None:
    file = TokenFile.open(safetensors(tmp_path, {"tokens": ("BF16", rows(5, ml_dtypes.bfloat16))}), 8)
    assert file.of_layer(0).dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(file.of_layer(92).read(1, 4), rows(5, ml_dtypes.bfloat16)[1:4])


def test_a_capture_has_an_input_and_maybe_an_output_of_each_layer(tmp_path: Path) -> None:
    tensors: Named = {
        "layers.2.input": ("F32", rows(5)),
        "layers.0.input": ("F32", rows(3)),
        "layers.0.output": ("F32", rows(3) + 1),
        "layers.0.expert_sum": ("F32", rows(3, width=4)),  # of no interest here
    }
    file = TokenFile.open(safetensors(tmp_path, tensors), 8)
    assert file.layers == (0, 2)
    np.testing.assert_array_equal(file.of_layer(0).read(0, 9), rows(3))
    np.testing.assert_array_equal(file.outputs[0].read(2, 3), rows(3)[2:] + 1)
    with pytest.raises(ValueError, match="has no input for layer 1; it has 0, 2"):
        file.of_layer(1)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"tokens": ("F32", rows(5, width=4))}, r"tokens has the shape \(5, 4\), not \[T, 8\]"),
        ({"tokens": ("F32", rows(0))}, "at least one token"),
        ({"tokens": ("F64", rows(5, np.float64))}, "tokens is float64, not bfloat16 or float16 or float32"),
        ({"x": ("F32", rows(5))}, "holds neither a tensor called tokens nor one called layers.N.input"),
        (
            {"layers.1.input": ("F32", rows(5)), "layers.1.output": ("F32", rows(4))},
            r"layer 1 has input \(5, 8\) but output \(4, 8\)",
        ),
    ],
)
def test_what_is_no_token_file(tmp_path: Path, tensors: Named, message: str) -> None:
    path = safetensors(tmp_path, tensors)
    with pytest.raises(ValueError, match=message):
        TokenFile.open(path, 8)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist; a token file is"):
        TokenFile.open(tmp_path / "tokens.npy", 8)
    for name, content, message in (
        ("tokens.txt", b"1 2 3", "must end in .npy or .safetensors"),
        ("tokens.npy", b"garbage", "is not a well-formed .npy file"),
        ("empty.npy", b"", "is not a well-formed .npy file"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            TokenFile.open(tmp_path / name, 8)


def test_a_file_that_is_cut_short_or_stored_by_columns(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, rows(5))
    file = TokenFile.open(path, 8)
    with path.open("r+b") as opened:
        opened.truncate(path.stat().st_size - 1)
    assert file.of_layer(0).read(0, 4).shape == (4, 8)
    with pytest.raises(ValueError, match="was cut short while the array was being read"):
        file.of_layer(0).read(0, 5)
    np.save(path, np.asfortranarray(rows(5)))
    with pytest.raises(ValueError, match="stored column by column"):
        TokenFile.open(path, 8)
