"""The reader of safetensors files: against the library, and against files made to hurt."""

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3jax.checkpoint.safetensors_file import MAX_HEADER_BYTES, SafetensorsFile
from k3jax.checkpoint.safetensors_writer import NewTensor, write_safetensors
from k3jax.strict_json import shown

ARRAYS = {
    "bf16": np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
    "f8": np.array([1.5, -448.0, 0.0]).astype(ml_dtypes.float8_e4m3fn),
    "f16": np.array([[1.5], [-2.0]], np.float16),
    "f32": np.array([1.0, -0.0, np.inf], np.float32),
    "f64": np.array(2.5),
    "u8": np.arange(256, dtype=np.uint8).reshape(16, 16),
    "i64": np.array([-(2**63), 2**63 - 1]),
    "bool": np.array([True, False]),
    "empty": np.zeros((0, 5), np.float32),
}


def file_bytes(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def written(folder: Path, content: bytes) -> Path:
    path = folder / "x.safetensors"
    path.write_bytes(content)
    return path


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(ARRAYS, path, metadata={"format": "np", "note": "é"})
    file = SafetensorsFile(path)
    assert file.metadata == {"format": "np", "note": "é"}
    assert set(file) == set(ARRAYS)
    assert len(file) == len(ARRAYS)
    for name, array in ARRAYS.items():
        assert file[name].dtype == array.dtype
        assert file[name].shape == array.shape
        assert file[name].tobytes() == array.tobytes()


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    dtypes = {"f64": "F64", "f32": "F32", "empty": "F32", "bf16": "BF16", "f16": "F16", "f8": "F8_E4M3", "u8": "U8"}
    order = ("f64", "f32", "empty", "bf16", "f16", "f8", "u8")
    write_safetensors(path, {name: (dtypes[name], ARRAYS[name]) for name in order})
    read = dict(safetensors.deserialize(path.read_bytes()))
    assert set(read) == set(order)
    for name in order:
        assert read[name]["dtype"] == dtypes[name]
        assert tuple(read[name]["shape"]) == ARRAYS[name].shape
        assert bytes(read[name]["data"]) == ARRAYS[name].tobytes()


def test_e8m0_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, file_bytes({"s": entry("F8_E8M0")}, bytes([0, 127, 134, 255])))
    scales = SafetensorsFile(path)["s"]
    assert scales.dtype == ml_dtypes.float8_e8m0fnu
    np.testing.assert_array_equal(scales.astype(np.float64), [2.0**-127, 1.0, 128.0, np.nan])


def test_narrow_types_are_listed_not_read(tmp_path: Path) -> None:
    file = SafetensorsFile(written(tmp_path, file_bytes({"w": entry("F4", [8], [0, 4])}, b"abcd")))
    assert "w" in file
    with pytest.raises(NotImplementedError, match="'w' has dtype F4"):
        file["w"]


def test_arrays_are_read_only_and_outlive_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, file_bytes({"a": entry()}, b"abcd"))
    array = SafetensorsFile(path)["a"]
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    assert array.tobytes() == b"abcd"


def test_unaligned_tensors_of_other_writers_are_read(tmp_path: Path) -> None:
    values = np.array([1.5, -3.0], ml_dtypes.bfloat16)
    header = {"a": entry("U8", [1], [0, 1]), "b": entry("BF16", [2], [1, 5])}
    tensor = SafetensorsFile(written(tmp_path, file_bytes(header, b"x" + values.tobytes())))["b"]
    np.testing.assert_array_equal(tensor.astype(np.float32), [1.5, -3.0])


HUGE = 10**30
FAULTS: dict[str, tuple[bytes, str]] = {
    "no length": (b"\x02\0", "truncated"),
    "empty file": (b"", "truncated"),
    "header cut": (file_bytes(b"{}", length=3), "truncated"),
    "header too long": (file_bytes(b"{}", length=MAX_HEADER_BYTES + 1), "limit"),
    "length of all ones": (b"\xff" * 8 + b"{}", "limit"),
    "not JSON": (file_bytes(b"{nope}"), "not valid JSON"),
    "not UTF-8": (file_bytes(b'{"\xff": 1}'), "not valid JSON"),
    "a list": (file_bytes([1]), "begin with"),
    "blank first": (file_bytes(b" {}"), "begin with"),
    "deep nesting": (file_bytes(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "nested too deeply"),
    "deep nesting of a shape": (
        file_bytes(b'{"a":{"dtype":"U8","data_offsets":[0,0],"shape":' + b"[" * 900 + b"]" * 900 + b"}}"),
        "shape must be|nested",
    ),
    "number of a million digits": (file_bytes(b'{"a":' + b"9" * 1_000_000 + b"}"), "not valid JSON"),
    "NaN": (file_bytes(b'{"a": NaN}'), "not JSON"),
    "name twice": (file_bytes(b'{"a": {}, "a": {}}'), "'a' appears twice"),
    "key twice": (file_bytes(b'{"a": {"dtype": "U8", "dtype": "U8"}}'), "'dtype' appears twice"),
    "lone surrogate": (file_bytes(b'{"\\ud800": {}}'), "not valid Unicode"),
    "metadata a list": (file_bytes({"__metadata__": []}), "__metadata__"),
    "metadata not strings": (file_bytes({"__metadata__": {"a": 1}}), "__metadata__"),
    "entry a number": (file_bytes({"a": 3}), "'a': expected an object"),
    "entry incomplete": (file_bytes({"a": {"dtype": "U8"}}), "'a': expected an object"),
    "entry with more": (file_bytes({"a": entry() | {"more": 1}}, b"abcd"), "'a': expected an object"),
    "unknown dtype": (file_bytes({"a": entry("F128")}, b"abcd"), "'a': unknown dtype 'F128'"),
    "dtype a list": (file_bytes({"a": entry(["U8"])}, b"abcd"), "'a': unknown dtype"),
    "shape a number": (file_bytes({"a": entry(shape=4)}, b"abcd"), "'a': shape"),
    "shape negative": (file_bytes({"a": entry(shape=[-4])}, b"abcd"), "'a': shape"),
    "shape float": (file_bytes({"a": entry(shape=[4.0])}, b"abcd"), "'a': shape"),
    "shape bool": (file_bytes({"a": entry(shape=[4, True])}, b"abcd"), "'a': shape"),
    "shape of rank 65": (file_bytes({"a": entry(shape=[4] + [1] * 64)}, b"abcd"), "'a': shape"),
    "shape overflows 64 bits": (file_bytes({"a": entry(shape=[2**32, 2**32])}, b"abcd"), "too many elements"),
    "shape wraps to the size": (file_bytes({"a": entry(shape=[2**62, 4, 2**62, 4])}, b"abcd"), "too many elements"),
    "shape huge and empty": (file_bytes({"a": entry(shape=[0, HUGE], offsets=[0, 0])}), "too many elements"),
    "offsets one": (file_bytes({"a": entry(offsets=[0])}, b"abcd"), "'a': data_offsets"),
    "offsets negative": (file_bytes({"a": entry(offsets=[-4, 0])}, b"abcd"), "'a': data_offsets"),
    "offsets bool": (file_bytes({"a": entry(shape=[1], offsets=[False, True])}, b"a"), "'a': data_offsets"),
    "offsets backwards": (file_bytes({"a": entry(offsets=[4, 0])}, b"abcd"), "begin after their end"),
    "offsets beyond the file": (file_bytes({"a": entry()}, b"abc"), "truncated"),
    "offsets far beyond": (file_bytes({"a": entry(offsets=[HUGE, HUGE + 4])}, b"abcd"), "truncated"),
    "size mismatch": (file_bytes({"a": entry("F32", [2])}, b"abcd"), "needs 8 bytes, data_offsets span 4"),
    "half a byte": (file_bytes({"a": entry("F4", [7])}, b"abcd"), "needs 3.5 bytes"),
    "overlap": (file_bytes({"a": entry(), "b": entry(offsets=[2, 6])}, b"abcdef"), "'b' overlaps tensor 'a'"),
    "same bytes": (file_bytes({"a": entry(), "b": entry()}, b"abcd"), "overlaps"),
    "hole": (file_bytes({"a": entry(offsets=[1, 5])}, b"abcde"), "belong to no tensor"),
    "bytes left over": (file_bytes({"a": entry()}, b"abcde"), "belong to no tensor"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_raises_a_value_error_that_names_the_file(fault: str, tmp_path: Path) -> None:
    content, message = FAULTS[fault]
    with pytest.raises(ValueError, match=message) as caught:
        SafetensorsFile(written(tmp_path, content))
    assert "x.safetensors" in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        SafetensorsFile(tmp_path / "nothing.safetensors")
    with pytest.raises(ValueError, match="not a regular file"):
        SafetensorsFile(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(ValueError, match="not a regular file"):
        SafetensorsFile(tmp_path / "pipe.safetensors")


def test_names_are_shown_safely() -> None:
    assert shown("a\x1b[31m\n") == "'a\\x1b[31m\\n'"
    assert len(shown("x" * 10_000_000)) < 300


def test_the_writer_keeps_tensors_aligned(tmp_path: Path) -> None:
    arrays: dict[str, tuple[str, np.ndarray]] = {
        "a": ("U8", np.zeros(1, np.uint8)),
        "b": ("F32", np.zeros(1, np.float32)),
    }
    with pytest.raises(ValueError, match=r"'b' .*wider dtypes first"):
        write_safetensors(tmp_path / "x.safetensors", arrays)
    assert NewTensor("a", "F32", (1 << 40, 1 << 40)).nbytes == 1 << 82


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
COUNT = st.integers(-2, 12) | st.integers(2**31, 2**66)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "BF16", "F32", "F4", "Q3"]) | JSON,
        "shape": st.lists(COUNT, max_size=3) | JSON,
        "data_offsets": st.lists(COUNT, min_size=2, max_size=2) | JSON,
    }
)
HEADER = st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), ENTRY | JSON, max_size=4)
EXAMPLES = max(200, settings().max_examples)
IN_ONE_FOLDER = settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])


def opens_or_raises_value_error(path: Path) -> None:
    """What we accept, the library accepts as well, and every tensor can be read."""
    try:
        file = SafetensorsFile(path)
    except ValueError:
        return
    with safetensors.safe_open(path, "numpy") as theirs:
        assert set(theirs.keys()) == set(file)
    for name, tensor in file.entries.items():
        if tensor.dtype not in ("F4", "F6_E2M3", "F6_E3M2"):
            assert file[name].shape == tensor.shape
            assert file[name].nbytes == tensor.end - tensor.begin


@IN_ONE_FOLDER
@given(header=HEADER, data=st.binary(max_size=16))
def test_any_header_opens_or_raises_value_error(header: dict[str, Any], data: bytes, tmp_path: Path) -> None:
    opens_or_raises_value_error(written(tmp_path, file_bytes(header, data)))


@IN_ONE_FOLDER
@given(flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=4), cut=st.integers(0, 200))
def test_any_damage_opens_or_raises_value_error(flips: list[tuple[int, int]], cut: int, tmp_path: Path) -> None:
    content = bytearray(safetensors.numpy.save({"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.uint8)}))
    for at, value in flips:
        content[at % len(content)] = value
    opens_or_raises_value_error(written(tmp_path, bytes(content[: len(content) - cut])))
