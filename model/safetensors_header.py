"""The header of a safetensors file, read without torch: as strictly as the library, before it, and within bounds.

A file is 8 bytes of length, a JSON object of that length, and the tensors' bytes without gaps or overlaps. Source: the
format's description at https://github.com/huggingface/safetensors, and what its library refuses.
"""

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from model.checkpoint_files import CheckpointError, check_is_file
from model.permissions import read_problem

WEIGHT_BYTES: Mapping[str, int] = {"F32": 4, "BF16": 2, "F16": 2}  # the dtypes weights may have, and their sizes
MAX_HEADER_BYTES = 100_000_000  # the library's own limit
MAX_TENSORS = 200_000  # in one file: 10,000 layers have some 120,000
# Brackets and commas bound what JSON becomes in memory. An entry has one brace, and nine or ten of all of them.
_MAX_BRACES = MAX_TENSORS + 2
_MAX_MARKS = 12 * MAX_TENSORS
# Bits of every dtype the format knows: files may hold masks that no model loads.
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
    """What a safetensors header says of one tensor: its dtype's name, its shape, its bytes from the file's start."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def check_is_weight(self) -> None:
        """Raises CheckpointError unless the dtype is one we load."""
        self._check_dtype(WEIGHT_BYTES)

    def check_length(self) -> None:
        """Raises CheckpointError unless the dtype is known, and the bytes are as many as the shape asks for."""
        self._check_dtype(_BITS)
        actual = self.end - self.begin
        if 8 * actual != math.prod(self.shape) * _BITS[self.dtype]:
            raise CheckpointError(
                f"{self.path}: tensor {self.name} has {actual} bytes, not those of its shape; save it again"
            )

    def _check_dtype(self, allowed: Mapping[str, int]) -> None:
        if self.dtype not in allowed:
            known, dtype = ", ".join(WEIGHT_BYTES), _word(self.dtype)
            raise CheckpointError(
                f"{self.path}: tensor {self.name} is {dtype}, one of {known} expected; save the weights as one"
            )


def read_headers(path: Path) -> dict[str, TensorHeader]:
    """A safetensors file's tensors by name.

    Raises:
        CheckpointError: the file cannot be read, the header is malformed or too large, tensors overlap, leave holes or
            have not the bytes of their shape, or the data is not as long as promised.
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
    """The file's size, its header's length and text."""
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
    """One entry of the header; `data` is where the file's data begins."""
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
    """Each tensor begins where the one before it ends, and is as long as its shape. Raises CheckpointError."""
    at = data
    for tensor in sorted(headers, key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != at:
            found = "overlaps the one before it" if tensor.begin < at else "leaves a hole before it"
            raise CheckpointError(f"{tensor.path}: tensor {tensor.name} {found}; save the weights again")
        tensor.check_length()
        at = tensor.end


def _check_metadata(metadata: object) -> None:
    """Texts by name, or none. Raises ValueError."""
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise ValueError("texts expected")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys are all different. Raises ValueError."""
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key stands there twice")
    return values


def _refuse_constant(name: str) -> NoReturn:
    """NaN and infinities, which Python's reader would take, are no JSON."""
    raise ValueError(f"{name} is no number")


def _sizes(numbers: object) -> tuple[int, ...]:
    """A list of whole numbers from 0 to 2^63 - 1. Raises ValueError for anything else."""
    if not isinstance(numbers, list) or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise ValueError("whole numbers expected")
    return tuple(numbers)


def _word(text: str) -> str:
    """A dtype's name, however it is made."""
    return text if text.isalnum() or text.replace("_", "").isalnum() else repr(text)[:80]
