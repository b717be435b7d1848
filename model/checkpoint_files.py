"""The files of a checkpoint directory, read without torch: JSON, safetensors headers, hashes; and their error."""

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WEIGHT_BYTES: Mapping[str, int] = {"F32": 4, "BF16": 2, "F16": 2}  # the dtypes weights may have, and their sizes


class CheckpointError(ValueError):
    """A checkpoint cannot be used. The message is one line: the file, what is wrong, what to do."""


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
        """Raises CheckpointError unless the dtype is one we load, and the bytes are as many as the shape asks for."""
        if self.dtype not in WEIGHT_BYTES:
            known, dtype = ", ".join(WEIGHT_BYTES), _word(self.dtype)
            raise CheckpointError(
                f"{self.path}: tensor {self.name} is {dtype}, one of {known} expected; save the weights as one"
            )
        if self.end - self.begin != math.prod(self.shape) * WEIGHT_BYTES[self.dtype]:
            actual = self.end - self.begin
            raise CheckpointError(
                f"{self.path}: tensor {self.name} has {actual} bytes, not those of its shape; save it again"
            )


def read_headers(path: Path) -> dict[str, TensorHeader]:
    """A safetensors file's tensors by name: 8 bytes of length, then JSON, then the data.

    Raises:
        CheckpointError: the file cannot be read, the header is malformed, or the data is not as long as promised.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size:
                raise CheckpointError(f"{path}: not a safetensors file; copy it again")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        headers = {}
        for name, entry in header.items():
            if not name.isprintable():
                raise CheckpointError(f"{path}: the tensor name {name!r} cannot be shown; save the weights again")
            begin, end = _sizes(entry["data_offsets"])
            headers[name] = TensorHeader(
                path=path,
                name=name,
                dtype=str(entry["dtype"]),
                shape=_sizes(entry["shape"]),
                begin=8 + length + begin,
                end=8 + length + end,
            )
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror}; is the checkpoint complete, and may this user read it?"
        ) from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a safetensors file; copy it again") from error
    if size != max((header.end for header in headers.values()), default=8 + length):
        raise CheckpointError(f"{path}: truncated or padded; copy it again")
    return headers


def _sizes(numbers: object) -> tuple[int, ...]:
    """A list of whole numbers from 0 on. Raises ValueError for anything else."""
    if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("whole numbers expected")
    return tuple(numbers)


def _word(text: str) -> str:
    """A dtype's name, however it is made."""
    return text if text.isalnum() or text.replace("_", "").isalnum() else repr(text)[:80]


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object.

    Raises:
        CheckpointError: it cannot be read, or holds something else.
    """
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; is this a checkpoint directory?") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: a JSON object expected")
    return values


def check_plain_name(path: Path, name: str) -> None:
    """Raises CheckpointError, naming the file that says so, unless `name` is a file beside it and nowhere else."""
    if Path(name).name != name or name in (".", "..") or "\\" in name or "\0" in name or len(name) > 255:
        raise CheckpointError(f"{path}: {name!r} is not a plain file name; list files of this directory only")
