"""Container of GGUF files: what the gguf package writes is read, and damaged files are rejected in one line."""

import contextlib
import os
import struct
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.gguf.container import GgufFile, is_gguf, read_gguf
from model.io.files import CheckpointError
from tests.model.gguf.files import container, entry, table_row, text, write_with_package


def read(path: Path, data: bytes) -> GgufFile:
    path.write_bytes(data)
    return read_gguf(path)


def test_a_file_of_the_gguf_package_is_read(tmp_path: Path) -> None:
    metadata = {"a.text": "grün", "a.size": 7, "a.rate": 0.5, "a.words": ["x", "", "▁y"], "a.numbers": [1, 2, 3]}
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    path = write_with_package(tmp_path / "m.gguf", metadata, {"w": matrix, "b": matrix[0].astype(np.float16)})
    found = read_gguf(path)
    assert is_gguf(path)
    assert (found.text("a.text"), found.scalars["a.size"], found.scalars["a.rate"]) == ("grün", 7, 0.5)
    assert (found.strings("a.words"), found.numbers("a.numbers")) == (["x", "", "▁y"], [1, 2, 3])
    assert (found.text("none"), found.strings("none"), found.numbers("none")) == (None, [], [])
    header = found.tensors["w"]
    assert (header.dtype, header.shape) == ("F32", (2, 3))
    stored = path.read_bytes()[header.begin : header.end]
    assert np.array_equal(np.frombuffer(stored, np.float32).reshape(2, 3), matrix)
    assert found.tensors["b"].dtype == "F16"


def test_an_unchanged_file_is_read_once(tmp_path: Path) -> None:
    """A file that has just been written is read again, since the time of its last change may not tell."""
    path, now = write_with_package(tmp_path / "m.gguf", {"a.size": 7}, {}), int(time.time())
    found = []
    for age_seconds in (0, 0, 90, 90, 80):
        os.utime(path, (now, now - age_seconds))
        found.append(read_gguf(path))
    assert [one is other for one, other in pairwise(found)] == [False, False, True, False]


def test_an_empty_file_of_version_2_is_read(tmp_path: Path) -> None:
    found = read(tmp_path / "x.gguf", container(version=2))
    assert (found.scalars, found.arrays, found.tensors) == ({}, {}, {})


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "cannot be read|not a GGUF file"),
        (b"GGML" + bytes(60), "not a GGUF file"),
        (b"GGUF", "the header ends"),
        (container(version=1), "its version is 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(20), "its version is 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "1152921504606846976 tensors and 0 metadata entries are too many"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "1152921504606846976 metadata entries"),
        (container([text("k" * 300)]), "must have 1 to 255 printable characters"),
        (container([text("a\nb")]), "must have 1 to 255 printable characters"),
        (container([text(b"\xff")]), "not UTF-8"),
        (container([entry("a", 8, text(b"\xff"))]), "value of a is not UTF-8"),
        (container([struct.pack("<Q", 2**63) + b"name"]), "the header ends"),
        (container([entry("a", 4, struct.pack("<I", 1))] * 2), "the metadata key a occurs twice"),
        (container([entry("a", 77, b"1234")]), "unknown value type 77"),
        (container([entry("a", 9, struct.pack("<IQ", 9, 1))]), "an array of the unknown type 9"),
        (container([entry("a", 9, struct.pack("<IQ", 4, 2**62))]), "the header ends"),
        (container([entry("a", 9, struct.pack("<IQ", 8, 2**62))]), "the header ends"),
        (container([entry("a", 9, struct.pack("<IQQ", 8, 1, 2**62))]), "the header ends"),
        (container([entry("general.alignment", 4, struct.pack("<I", 24))]), "alignment is 24"),
        (container([entry("general.alignment", 4, struct.pack("<I", 0))]), "alignment is 0"),
        (container([entry("general.alignment", 8, text("32"))]), "alignment is '32'"),
        (container(rows=[table_row("w", [4] * 5, 0, 0)]), "w has 5 dimensions"),
        (container(rows=[table_row("w", [], 0, 0)]), "w has 0 dimensions"),
        (container(rows=[table_row("w", [4], 20, 0)], data=bytes(64)), "w has the type 20, not one of F32"),
        (container(rows=[table_row("w", [0, 4], 0, 0)]), "do not fit its type"),
        (container(rows=[table_row("w", [33], 2, 0)], data=bytes(64)), "of tensor w do not fit its type Q4_0"),
        (container(rows=[table_row("w", [4], 0, 8)], data=bytes(64)), "w has the offset 8, not a multiple of 32"),
        (container(rows=[table_row("w", [9], 0, 0)], data=bytes(32)), "w ends at byte"),
        (container(rows=[table_row("w", [2**63, 2**63], 0, 0)], data=bytes(32)), "w ends at byte"),
        (container(rows=[table_row("w", [4], 0, 0)] * 2, data=bytes(32)), "the tensor w occurs twice"),
        (
            container(rows=[table_row("v", [9], 0, 0), table_row("w", [4], 0, 32)], data=bytes(64)),
            "the tensors v and w overlap",
        ),
    ],
)
def test_damaged_files_are_rejected(tmp_path: Path, data: bytes, problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        read(tmp_path / "x.gguf", data)


def test_wrong_kinds_of_values_are_rejected(tmp_path: Path) -> None:
    words = struct.pack("<IQ", 8, 1) + text(b"\xff")
    numbers = struct.pack("<IQI", 4, 1, 5)
    entries = [entry("size", 4, struct.pack("<I", 1)), entry("yes", 7, b"\1")]
    entries += [entry("words", 9, words), entry("numbers", 9, numbers)]
    found = read(tmp_path / "x.gguf", container(entries))
    for look, problem in (
        (lambda: found.text("size"), "size must be a string, not 1; convert"),
        (lambda: found.text("words"), "words must be a string; convert"),
        (lambda: found.integer("yes"), "yes must be an integer, not True; convert"),
        (lambda: found.integer("numbers"), "numbers must be an integer; convert"),
        (lambda: found.flag("size", default=True), "size must be true or false, not 1; convert"),
        (lambda: found.strings("size"), "size must be an array"),
        (lambda: found.strings("numbers"), "numbers must be an array of strings"),
        (lambda: found.numbers("words"), "words must be an array of numbers"),
        (lambda: found.strings("words"), "words has an item that is not UTF-8"),
    ):
        with pytest.raises(CheckpointError, match=problem):
            look()
    assert (found.integer("size"), found.flag("yes", default=False)) == (1, True)
    assert (found.integer("missing"), found.flag("missing", default=True), found.text("missing")) == (None, True, None)


@pytest.mark.parametrize(("kind", "item"), [(0, b"1"), (8, text(""))])
def test_a_huge_array_is_rejected(tmp_path: Path, kind: int, item: bytes) -> None:
    """Its items would take ten times the bytes of the file as Python objects."""
    array = struct.pack("<IQ", kind, 2**22 + 1) + item * (2**22 + 1)
    found = read(tmp_path / "x.gguf", container([entry("a", 9, array)]))
    with pytest.raises(CheckpointError, match="a has over 4,194,304 items"):
        (found.strings if kind == 8 else found.numbers)("a")


def test_a_file_that_shrinks_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    found = read(path, container([entry("numbers", 9, struct.pack("<IQII", 4, 2, 5, 6))]))
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(CheckpointError, match="has been truncated"):
        found.numbers("numbers")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_truncated_or_changed_file_is_read_or_rejected(tmp_path: Path, data: st.DataObject) -> None:
    """Tensors that a changed file lists lie inside the file."""
    entries = [entry("a", 8, text("b")), entry("words", 9, struct.pack("<IQ", 8, 2) + text("x") + text("y"))]
    rows = [table_row("v", [32, 2], 8, 0), table_row("w", [4], 0, 96)]
    changed = bytearray(container(entries, rows, bytes(112)))
    for _ in range(data.draw(st.integers(0, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    size = data.draw(st.integers(0, len(changed)) | st.just(len(changed)))
    with contextlib.suppress(CheckpointError):
        found = read(tmp_path / "x.gguf", bytes(changed[:size]))
        for key, span in found.arrays.items():
            assert (found.strings if span.kind == 8 else found.numbers)(key) is not None
        assert all(header.end <= size for header in found.tensors.values())
