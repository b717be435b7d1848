"""GGUF files of the tests, written byte by byte or by llama.cpp's gguf package."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, data: bytes) -> bytes:
    """Return the bytes of a metadata entry; kinds: 4 for uint32, 8 for a string, 9 for an array."""
    return text(key) + struct.pack("<I", kind) + data


def table_row(name: str, sizes: Sequence[int], kind: int, offset: int) -> bytes:
    numbers = struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
    return text(name) + numbers


def container(entries: Sequence[bytes] = (), rows: Sequence[bytes] = (), data: bytes = b"", version: int = 3) -> bytes:
    """Return the bytes of a GGUF file, whose data begin at a multiple of 32."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(rows), len(entries)) + b"".join(entries) + b"".join(rows)
    return header + bytes(-len(header) % 32) + data


def write_with_package(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """Write a file with llama.cpp's gguf package; metadata values are strings, numbers or lists."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
