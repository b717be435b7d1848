"""Header of a safetensors file, read without torch, with the library's strictness and bounded memory.

A file is 8 bytes of header length, a JSON object of that length, and the tensors' bytes without gaps or overlaps.
Source: the format's description at https://github.com/huggingface/safetensors, and what its library rejects.
"""

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from model.io.checkpoint_files import CheckpointError, check_is_file
from model.io.permissions import read_problem

WEIGHT_BYTES: Mapping[str, int] = {"F32": 4, "BF16": 2, "F16": 2}  # the dtypes weights may have, and their sizes
MAX_HEADER_BYTES = 100_000_000  # the library's own limit
MAX_TENSORS = 200_000  # per file; 10,000 layers have some 120,000 tensors
# Counting braces, brackets and commas before parsing bounds the memory of the parsed JSON. A tensor's entry has one
# opening brace, and nine or ten of these characters in total.
_MAX_BRACES = MAX_TENSORS + 2
_MAX_MARKS = 12 * MAX_TENSORS
# Bits of every dtype in the format: files may contain tensors that no model loads, such as masks.
_BITS: Mapping[str, int] = {
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorHeader:
    """One tensor's entry in a safetensors header: dtype, shape, and the range of its bytes from the file's start."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def check_is_weight(self) -> None:
        """Check that the dtype is supported for weights. Raises CheckpointError."""
        self._check_dtype(WEIGHT_BYTES)

    def check_length(self) -> None:
        """Check that the dtype is known and that the number of bytes fits the shape. Raises CheckpointError."""
        self._check_dtype(_BITS)
        actual = self.end - self.begin
        if 8 * actual != math.prod(self.shape) * _BITS[self.dtype]:
            raise CheckpointError(
                f"{self.path}: tensor {self.name} has {actual} bytes, which do not fit its shape; save it again"
            )

    def _check_dtype(self, allowed: Mapping[str, int]) -> None:
        if self.dtype not in allowed:
            known, dtype = ", ".join(WEIGHT_BYTES), _word(self.dtype)
            raise CheckpointError(
                f"{self.path}: tensor {self.name} is {dtype}, one of {known} expected; save it as one of these"
            )


def read_headers(path: Path) -> dict[str, TensorHeader]:
    """Read the tensor headers of a safetensors file, by name.

    Raises:
        CheckpointError: the file cannot be read, the header is malformed or too large, tensors overlap, leave holes or
            have not the bytes of their shape, or the file's length differs from the header's.
    """
    try:
        size, length, text = _read(path)
        header = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
        _check_metadata(header.pop("__metadata__", None))
        headers = {name: _tensor(path, name, entry, 8 + length) for name, entry in header.items()}
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: {read_problem(path, error)}") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a safetensors file; copy it again") from error
    if size != max((tensor.end for tensor in headers.values()), default=8 + length):
        raise CheckpointError(f"{path}: truncated or padded; copy it again")
    _check_order(headers.values(), 8 + length)
    return headers


def _read(path: Path) -> tuple[int, int, str]:
    """Return the file's size, the header's length and the header's text."""
    check_is_file(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(size, MAX_HEADER_BYTES):
            raise CheckpointError(f"{path}: not a safetensors file; copy it again")
        header = file.read(length)
    braces = header.count(b"{")
    if braces > _MAX_BRACES or braces + header.count(b"[") + header.count(b",") > _MAX_MARKS:
        raise CheckpointError(
            f"{path}: the header has more entries than {MAX_TENSORS:,} tensors need; save the weights in several files"
        )
    return size, length, header.decode()


def _tensor(path: Path, name: str, entry: Mapping[str, Any], data: int) -> TensorHeader:
    """Convert one entry of the header; `data` is the offset at which the tensors' bytes begin."""
    if not name.isprintable():
        raise CheckpointError(f"{path}: the tensor name {name!r} cannot be shown; save the weights again")
    begin, end = _sizes(entry["data_offsets"])
    return TensorHeader(
        path=path,
        name=name,
        dtype=str(entry["dtype"]),
        shape=_sizes(entry["shape"]),
        begin=data + begin,
        end=data + end,
    )


def _check_order(headers: Iterable[TensorHeader], data: int) -> None:
    """Check that each tensor begins where the previous one ends, and fits its shape. Raises CheckpointError."""
    at = data
    for tensor in sorted(headers, key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != at:
            found = "overlaps the tensor before it" if tensor.begin < at else "leaves a hole before it"
            raise CheckpointError(f"{tensor.path}: tensor {tensor.name} {found}; save the weights again")
        tensor.check_length()
        at = tensor.end


def _check_metadata(metadata: object) -> None:
    """Check that metadata maps names to strings, or is absent. Raises ValueError."""
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise ValueError("strings expected")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object from pairs with distinct keys. Raises ValueError for a repeated key."""
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key is repeated")
    return values


def _refuse_constant(name: str) -> NoReturn:
    """Reject NaN and infinities: Python's reader accepts them, JSON does not."""
    raise ValueError(f"{name} is not a JSON number")


def _sizes(numbers: object) -> tuple[int, ...]:
    """Convert a list of whole numbers from 0 to 2^63 - 1. Raises ValueError for anything else."""
    if not isinstance(numbers, list) or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise ValueError("whole numbers expected")
    return tuple(numbers)


def _word(text: str) -> str:
    """Return a dtype's name, escaped and shortened if it has unusual characters."""
    return text if text.isalnum() or text.replace("_", "").isalnum() else repr(text)[:80]
