"""Header of a safetensors file, read with bounded memory; the safetensors library validates the file. Torch-free.

A file is 8 bytes of header length, a JSON object of that length, and the tensors' bytes without gaps or overlaps.
Source: https://github.com/huggingface/safetensors
"""

import json
import struct
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from model.io.files import CheckpointError, check_is_file, reading

WEIGHT_DTYPES = ("F32", "BF16", "F16")  # of weights that are not quantized
MAX_HEADER_BYTES = 100_000_000  # the library's own limit
MAX_TENSORS = 200_000  # per file; 10,000 layers have some 120,000 tensors
# Counting braces, brackets and commas before parsing bounds the memory of the parsed JSON. A tensor's entry has one
# opening brace, and nine or ten of these characters in total.
_MAX_BRACES = MAX_TENSORS + 2
_MAX_MARKS = 12 * MAX_TENSORS


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorHeader:
    """Entry of one tensor in the header of a safetensors or GGUF file.

    dtype: name in that format, such as BF16 or Q4_K.
    begin, end: positions of the tensor's bytes in the file.
    index: position of a piece in the first dimension of the stored tensor; None: the entry is the whole tensor.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    index: int | None = None

    def pieces(self) -> list["TensorHeader"]:
        """Return one entry for each index of the tensor's first dimension. The entries lack this dimension."""
        count = self.shape[0]
        size = (self.end - self.begin) // count
        starts = (self.begin + index * size for index in range(count))
        return [
            replace(self, shape=self.shape[1:], begin=start, end=start + size, index=index)
            for index, start in enumerate(starts)
        ]


def read_headers(path: Path) -> dict[str, TensorHeader]:
    """Read the header of a safetensors file; return each tensor's entry by the tensor's name.

    Raises:
        CheckpointError: the file cannot be read, has more than `MAX_TENSORS` tensors, or is not valid.
    """
    check_is_file(path)
    try:
        with reading(path):
            text = _read_header(path)
            with safe_open(path, framework="np"):
                pass
    except (struct.error, SafetensorError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise CheckpointError(f"{path}: not a valid safetensors file ({reason}); copy the file again") from error
    entries = json.loads(text)
    entries.pop("__metadata__", None)
    if odd := next((name for name in entries if not name.isprintable()), None):
        raise CheckpointError(f"{path}: the tensor name {odd!r} has unprintable characters; save the weights again")
    headers = {}
    for name, entry in entries.items():
        begin, end = (8 + len(text) + offset for offset in entry["data_offsets"])
        shape = tuple(entry["shape"])
        headers[name] = TensorHeader(path=path, name=name, dtype=entry["dtype"], shape=shape, begin=begin, end=end)
    return headers


def _read_header(path: Path) -> bytes:
    """Return the JSON text of a file's header. Raises CheckpointError if it is truncated or too large to parse."""
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(size, MAX_HEADER_BYTES):
            raise CheckpointError(f"{path}: not a valid safetensors file (truncated header); copy the file again")
        header = file.read(length)
    braces = header.count(b"{")
    if braces > _MAX_BRACES or braces + header.count(b"[") + header.count(b",") > _MAX_MARKS:
        raise CheckpointError(
            f"{path}: the header is larger than that of {MAX_TENSORS:,} tensors; save the weights in several files"
        )
    return header
