"""Container of a GGUF file: metadata and the table of tensors, checked before use. Torch-free.

A file is the magic bytes, version, number of tensors and of metadata entries, the entries, the table of tensors, and
the tensors' bytes, each at a multiple of the alignment. Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import functools
import math
import mmap
import struct
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from model.gguf.tensor_types import TYPES_BY_ID
from model.io.files import CheckpointError, check_is_file, reading
from model.io.safetensors_header import MAX_HEADER_BYTES, MAX_TENSORS, TensorHeader

Scalar = int | float | bool | str
MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_ENTRIES = 2**16
_MAX_ITEMS = 2**22  # maximum for an array: over ten times the largest published vocabulary
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_MOMENT_NS = 2 * 10**9  # after a change, in which another change may get the same time
_NUMBERS = {
    **{0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f"},
    **{7: "<?", 10: "<Q", 11: "<q", 12: "<d"},
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, kw_only=True, slots=True)
class ArraySpan:
    """Array in the metadata of a GGUF file: type and number of items, and their bytes' range in the file."""

    kind: int
    count: int
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GgufFile:
    """Metadata of a GGUF file, scalars and arrays by key, and the headers of its tensors by name."""

    path: Path
    scalars: Mapping[str, Scalar]
    arrays: Mapping[str, ArraySpan]
    tensors: Mapping[str, TensorHeader]

    def text(self, key: str) -> str | None:
        """Return a GGUF metadata key's string; None if absent. Raises CheckpointError for any other value."""
        value = self._scalar(key, "a string")
        if value is not None and not isinstance(value, str):
            self._reject(key, "a string")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a GGUF metadata key's bool; `default` if absent. Raises CheckpointError for any other value."""
        value = self._scalar(key, "true or false")
        if value is not None and not isinstance(value, bool):
            self._reject(key, "true or false")
        return default if value is None else value

    def integer(self, key: str) -> int | None:
        """Return a GGUF metadata key's integer; None if absent. Raises CheckpointError for any other value."""
        value = self._scalar(key, "an integer")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            self._reject(key, "an integer")
        return value

    def strings(self, key: str, indices: Container[int] | None = None) -> list[str]:
        """Return a GGUF metadata key's array of strings, or its items at some indices; empty if absent.

        Raises CheckpointError for any other value.
        """
        if (span := self._span(key)) is None:
            return []
        if span.kind != _STRING:
            self._reject(key, "an array of strings")
        data, items, end, unpack = self._bytes(span), [], 0, struct.Struct("<Q").unpack_from
        try:
            for index in range(span.count):
                begin = end + 8
                end = begin + unpack(data, end)[0]
                if indices is None or index in indices:
                    items.append(data[begin:end].decode())
            return items
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {key} has an item that is not UTF-8; copy the file again") from error

    def numbers(self, key: str) -> list[float]:
        """Return a GGUF metadata key's array of numbers; empty if absent. Raises CheckpointError for other values."""
        if (span := self._span(key)) is None:
            return []
        if span.kind == _STRING:
            self._reject(key, "an array of numbers")
        return [value for (value,) in struct.iter_unpack(_NUMBERS[span.kind], self._bytes(span))]

    def _scalar(self, key: str, kind: str) -> Scalar | None:
        if key in self.arrays:
            self._reject(key, kind)
        return self.scalars.get(key)

    def _reject(self, key: str, kind: str) -> NoReturn:
        value = f", not {self.scalars[key]!r:.80}" if key in self.scalars else ""
        raise CheckpointError(f"{self.path}: {key} must be {kind}{value}; convert the model again")

    def _span(self, key: str) -> ArraySpan | None:
        if key in self.scalars:
            self._reject(key, "an array")
        span = self.arrays.get(key)
        if span is not None and span.count > _MAX_ITEMS:
            raise CheckpointError(f"{self.path}: {key} has over {_MAX_ITEMS:,} items; convert the model again")
        return span

    def _bytes(self, span: ArraySpan) -> bytes:
        with reading(self.path), self.path.open("rb") as file:
            file.seek(span.begin)
            data = file.read(span.end - span.begin)
        if len(data) < span.end - span.begin:
            raise CheckpointError(f"{self.path}: has been truncated; copy the file again")
        return data


def is_gguf(path: Path) -> bool:
    """Return True if a path is a file whose name ends in .gguf, in upper or lower case."""
    return path.suffix.lower() == ".gguf" and path.is_file()


def read_gguf(path: Path) -> GgufFile:
    """Read the metadata and the table of tensors of a GGUF file, unless the last call has read the same file.

    Raises:
        CheckpointError: the file cannot be read, is damaged, or has a tensor type that is not supported.
    """
    check_is_file(path)
    with reading(path):
        status = path.stat()
    stamp = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
    read = _read if time.time_ns() - status.st_mtime_ns > _MOMENT_NS else _read.__wrapped__
    return read(path, stamp)


@functools.lru_cache(maxsize=1)
def _read(path: Path, stamp: tuple[int, ...]) -> GgufFile:
    """Read a GGUF file. stamp: numbers that identify the file and its last change."""
    with reading(path), path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise CheckpointError(f"{path}: not a GGUF file: its first bytes are not GGUF; copy the file again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).read()


class _Reader:
    """Reader of a GGUF file's header, at a position that moves towards the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._position = 4
        self._limit = min(len(data), MAX_HEADER_BYTES)

    def read(self) -> GgufFile:
        if (version := self._number("<I")) not in _VERSIONS:
            self._fail(f"its version is {version}, and only 2 and 3 in little-endian are read; convert the model again")
        num_tensors, num_entries = self._number("<Q"), self._number("<Q")
        if num_tensors > MAX_TENSORS or num_entries > _MAX_ENTRIES:
            self._fail(f"{num_tensors} tensors and {num_entries} metadata entries are too many; copy the file again")
        scalars: dict[str, Scalar] = {}
        arrays: dict[str, ArraySpan] = {}
        for _ in range(int(num_entries)):
            key, kind = self._name("metadata key"), self._number("<I")
            if key in scalars or key in arrays:
                self._fail(f"the metadata key {key} occurs twice; convert the model again")
            if kind == _ARRAY:
                arrays[key] = self._array(key)
            else:
                scalars[key] = self._scalar(key, int(kind))
        alignment = scalars.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > 2**20:
            self._fail(f"general.alignment is {alignment!r}, not a power of two up to 2**20; convert the model again")
        tensors = self._tensors(int(num_tensors), int(alignment))
        return GgufFile(path=self._path, scalars=scalars, arrays=arrays, tensors=tensors)

    def _fail(self, problem: str) -> None:
        raise CheckpointError(f"{self._path}: {problem}")

    def _skip(self, count: int) -> int:
        """Move the reading position forward by a number of bytes; return the old position.

        Raises CheckpointError at the end of the file, and beyond the maximum size of a header.
        """
        begin = self._position
        if count > self._limit - begin:
            self._fail(
                f"the header ends after {self._limit} bytes, within an entry; copy the file again"
                if self._limit == len(self._data)
                else f"the header has over {MAX_HEADER_BYTES:,} bytes; convert the model again"
            )
        self._position += count
        return begin

    def _number(self, form: str) -> int | float:
        begin = self._skip(struct.calcsize(form))
        value: int | float = struct.unpack_from(form, self._data, begin)[0]
        return value

    def _string(self, what: str) -> str:
        length = int(self._number("<Q"))
        begin = self._skip(length)
        try:
            return self._data[begin : begin + length].decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path}: the {what} is not UTF-8; copy the file again") from error

    def _name(self, what: str) -> str:
        name = self._string(what)
        if not name or not name.isprintable() or len(name) > 255:
            self._fail(f"the {what} {name[:80]!r} must have 1 to 255 printable characters; copy the file again")
        return name

    def _scalar(self, key: str, kind: int) -> Scalar:
        if kind == _STRING:
            return self._string(f"value of {key}")
        if kind not in _NUMBERS:
            self._fail(f"{key} has the unknown value type {kind}; convert the model again")
        return self._number(_NUMBERS[kind])

    def _array(self, key: str) -> ArraySpan:
        """Read past a metadata array of numbers or strings; return its type, number of items and range of bytes."""
        kind, count = int(self._number("<I")), int(self._number("<Q"))
        begin = self._position
        if kind in _NUMBERS:
            self._skip(count * struct.calcsize(_NUMBERS[kind]))
        elif kind == _STRING:
            self._skip_strings(count)
        else:
            self._fail(f"{key} is an array of the unknown type {kind}; convert the model again")
        return ArraySpan(kind=kind, count=count, begin=begin, end=self._position)

    def _skip_strings(self, count: int) -> None:
        # Not `_number` and `_skip`: a file has 400,000 of these strings, which this loop passes in 60 ms.
        position, unpack, data, last = self._position, struct.Struct("<Q").unpack_from, self._data, self._limit - 8
        for _ in range(count):
            if position > last:
                break
            position += 8 + unpack(data, position)[0]
        else:
            self._skip(position - self._position)
            return
        self._skip(self._limit)  # raises

    def _tensors(self, num_tensors: int, alignment: int) -> dict[str, TensorHeader]:
        """Return the header of each tensor by name, from the table of tensors.

        Raises CheckpointError for two tensors with one name or with common bytes, or with bytes beyond the file.
        """
        entries = [self._tensor_entry(alignment) for _ in range(num_tensors)]
        start = -(-self._position // alignment) * alignment
        found: dict[str, TensorHeader] = {}
        for name, dtype, shape, offset, size in entries:
            begin, end = start + offset, start + offset + size
            if name in found:
                self._fail(f"the tensor {name} occurs twice; convert the model again")
            if end > len(self._data):
                self._fail(f"tensor {name} ends at byte {end}, the file at {len(self._data)}; copy the file again")
            found[name] = TensorHeader(path=self._path, name=name, dtype=dtype, shape=shape, begin=begin, end=end)
        for one, other in pairwise(sorted(found.values(), key=lambda header: header.begin)):
            if one.end > other.begin:
                self._fail(f"the tensors {one.name} and {other.name} overlap; convert the model again")
        return found

    def _tensor_entry(self, alignment: int) -> tuple[str, str, tuple[int, ...], int, int]:
        """Return name, type, shape, offset and size in bytes of the next tensor in the table."""
        name = self._name("tensor name")
        num_dimensions = int(self._number("<I"))
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            self._fail(f"tensor {name} has {num_dimensions} dimensions, not 1 to 4; copy the file again")
        sizes = [int(self._number("<Q")) for _ in range(num_dimensions)]
        type_id, offset = int(self._number("<I")), int(self._number("<Q"))
        kind = TYPES_BY_ID.get(type_id)
        if kind is None:
            known = ", ".join(other.name for other in TYPES_BY_ID.values())
            raise CheckpointError(
                f"{self._path}: tensor {name} has the type {type_id}, not one of {known}; quantize to one of these"
            )
        if not all(sizes) or sizes[0] % kind.numbers or (len(sizes) == 1 and kind.is_quantized):
            self._fail(f"the sizes {sizes} of tensor {name} do not fit its type {kind.name}; convert the model again")
        if offset % alignment:
            self._fail(f"tensor {name} has the offset {offset}, not a multiple of {alignment}; convert the model again")
        size = math.prod(sizes) // kind.numbers * kind.bytes
        return name, kind.name, tuple(reversed(sizes)), offset, size
