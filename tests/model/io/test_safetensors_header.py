"""Safetensors headers: invalid headers are rejected before loading, in one line, with bounded memory."""

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from model.io.files import CheckpointError, read_json
from model.io.safetensors_header import MAX_HEADER_BYTES, MAX_TENSORS, read_headers


def entry(begin: int, end: int, *, dtype: str = "F32", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def write(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def text(**entries: Any) -> bytes:
    return json.dumps(entries).encode()


ONE = json.dumps(entry(0, 4)).encode()
# Header, and number of data bytes after the header.
REFUSED: dict[str, tuple[bytes, int]] = {
    "overlap": (text(a=entry(0, 8), b=entry(4, 8)), 8),
    "the same bytes": (text(a=entry(0, 4), b=entry(0, 4)), 4),
    "backwards": (text(a=entry(4, 0, shape=[0]), b=entry(4, 4, shape=[0])), 4),
    "hole": (text(a=entry(0, 4), b=entry(8, 12)), 12),
    "hole at the beginning": (text(a=entry(4, 8)), 8),
    "key twice": (b'{"a":' + ONE + b',"a":' + text(**entry(4, 8)) + b"}", 8),
    "key twice in an entry": (ONE.join([b'{"a":', b"}"]).replace(b'"dtype"', b'"dtype":"F32","dtype"'), 4),
    "metadata twice": (b'{"__metadata__":{},"__metadata__":{},"a":' + ONE + b"}", 4),
    "metadata a number": (text(__metadata__=5, a=entry(0, 4)), 4),
    "metadata of numbers": (text(__metadata__={"format": 5}, a=entry(0, 4)), 4),
    "mask of another length": (text(a=entry(0, 4, dtype="BOOL", shape=[3])), 4),
    "part of a byte": (text(a=entry(0, 1, dtype="F4", shape=[3])), 1),
    "unknown dtype": (text(a=entry(0, 4, dtype="Q9")), 4),
    "a size beyond all bounds": (text(a=entry(0, 0, shape=[10**30, 0])), 0),
    "NaN": (b'{"a":' + ONE[:-1] + b',"x":NaN}}', 4),
    "byte order mark": (b"\xef\xbb\xbf" + text(a=entry(0, 4)), 4),
    "UTF-16": (json.dumps({"a": entry(0, 4)}).encode("utf-16"), 4),
}


@pytest.mark.parametrize("name", REFUSED)
def test_headers_that_the_library_rejects_are_rejected(tmp_path: Path, name: str) -> None:
    header, num_bytes = REFUSED[name]
    path = write(tmp_path / "x.safetensors", header, bytes(num_bytes))
    with pytest.raises(SafetensorError), safe_open(path, framework="pt"):
        pass
    with pytest.raises(CheckpointError, match="not a valid safetensors file") as caught:
        read_headers(path)
    assert str(caught.value).startswith(f"{path}: ")


TAKEN: dict[str, tuple[bytes, int]] = {
    "no tensors": (b"{}", 0),
    "spaces around it": (b" " + text(a=entry(0, 4)) + b"   ", 4),
    "tensors of no bytes": (text(a=entry(0, 0), b=entry(0, 4), c=entry(4, 4, shape=[3, 0])), 4),
    "a scalar": (text(a=entry(0, 4, shape=[])), 4),
    "no metadata": (text(__metadata__=None, a=entry(0, 4)), 4),
    "half bytes": (text(a=entry(0, 1, dtype="F4", shape=[2])), 1),
}


@pytest.mark.parametrize("name", TAKEN)
def test_headers_that_the_library_accepts_are_accepted(tmp_path: Path, name: str) -> None:
    header, num_bytes = TAKEN[name]
    path = write(tmp_path / "x.safetensors", header, bytes(num_bytes))
    with safe_open(path, framework="pt") as file:
        assert set(read_headers(path)) == set(file.keys())


def test_tensors_of_every_dtype_are_read_with_their_shape(tmp_path: Path) -> None:
    names = [
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "uint16",
        "uint32",
    ]
    names += ["uint64", "bool", "complex64", "float8_e4m3fn", "float8_e5m2"]
    tensors = {name: torch.zeros(3, dtype=getattr(torch, name)) for name in names}
    save_file(tensors, tmp_path / "x.safetensors")
    assert {name: header.shape for name, header in read_headers(tmp_path / "x.safetensors").items()} == dict.fromkeys(
        tensors, (3,)
    )


def sparse(path: Path, length: int) -> Path:
    """Write a sparse safetensors file whose header has `length` bytes; return its path."""
    with path.open("wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(8 + length)
    return path


BULKS: dict[str, bytes] = {
    "entries": b"{" + b",".join(b'"%d":{}' % number for number in range(1_000_000)) + b"}",
    "lists": b'{"a":[' + b"[]," * 3_000_000 + b"[]]}",
    "numbers": b'{"a":[' + b"0," * 3_000_000 + b"0]}",
}


def peak_of_refusing(path: Path, message: str) -> int:
    """Return the peak of Python's memory, in bytes, while the file is read and rejected with this message."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message):
            read_headers(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", BULKS)
def test_a_header_with_too_many_entries_is_not_parsed(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "x.safetensors", BULKS[name])
    message = f"larger than that of {MAX_TENSORS:,} tensors; save the weights in several files"
    assert peak_of_refusing(path, message) < 2 * len(BULKS[name])


def test_a_header_over_the_size_limit_is_not_read(tmp_path: Path) -> None:
    path = sparse(tmp_path / "x.safetensors", MAX_HEADER_BYTES + 1)
    assert peak_of_refusing(path, "not a valid safetensors file") < 2**20


def test_as_many_tensors_as_allowed_are_read(tmp_path: Path) -> None:
    entries = {f"layers.{number}.weight": entry(0, 0, shape=[4, 0]) for number in range(MAX_TENSORS)}
    assert len(read_headers(write(tmp_path / "x.safetensors", text(**entries)))) == MAX_TENSORS


@pytest.mark.parametrize("read", [read_headers, read_json])
def test_pipes_directories_and_devices_are_not_opened(tmp_path: Path, read: Any) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "directory", "device"):
        with pytest.raises(CheckpointError, match=f"{name}: not a regular file; put the file itself there"):
            read(tmp_path / name)
    (tmp_path / "broken").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="broken: a link to a file that is not there; download the file again"):
        read(tmp_path / "broken")
