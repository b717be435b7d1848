"""Reading and writing of a checkpoint's weight files, so that no tensor is in memory twice.

Pages of a mapped file that were read count as this process's memory until the file is unmapped. So files are reopened
every few dozen MB, and tensors are copied in slices, each checked for NaN and infinity and converted to its final
dtype on the way. A matrix that the caller will pack is not copied: until packed, its tensor is the mapped file itself.

Legend: H heads, D head dimension, E hidden size.
"""

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from model.config import ModelConfig
from model.gguf.block_types import dequantize
from model.gguf.container import is_gguf
from model.gguf.tensor_types import TENSOR_TYPES
from model.huggingface.directory import INDEX_FILE, SINGLE_FILE
from model.huggingface.families.reading.family import Layout
from model.huggingface.tensor_placement import Placement
from model.io.files import CheckpointError, write_json
from model.io.safetensors_header import TensorHeader

MAX_SHARD_BYTES = 5 * 10**9  # Hugging Face's convention
SLICE_BYTES = 2**24
MAPPED_BYTES = 2**25
# Numbers that are checked at a time: few enough to stay in a core's cache between the two searches.
_NUMBERS_PER_CHECK = 2**18
# Bit patterns of infinity by stored dtype, and of the least number that rounds to infinity by stored and target dtype.
_INFINITY = {torch.float32: 0x7F80_0000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
_BEYOND = {
    (torch.float32, torch.bfloat16): 0x7F7F_8000,
    (torch.float32, torch.float16): 0x477F_F000,
    (torch.bfloat16, torch.float16): 0x4780,
}
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def read_weights(
    placements: Mapping[str, Placement],
    config: ModelConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    packed_next: Collection[str] = (),
) -> dict[str, Tensor]:
    """Read every tensor of a model from checkpoint files to `device`, converted to `dtype`.

    Peak memory: the tensors themselves, and at most MAPPED_BYTES + SLICE_BYTES of mapped files.

    Args:
        packed_next: names of tensors that the caller packs before any other use. Such a tensor stays mapped from its
            file, if it is one stored tensor and `map_parts` allows it.

    Raises:
        CheckpointError: a file cannot be read, or a number is NaN, infinite or too large for `dtype`.
    """
    tensors: dict[str, Tensor] = {}
    copies: dict[Path, list[tuple[TensorHeader, Tensor, Layout]]] = {}
    for name, place in placements.items():
        if name in packed_next and len(place.parts) == 1 and (parts := map_parts(place, device, dtype)):
            (tensors[name],) = parts
            continue
        tensors[name] = torch.empty(place.shape, dtype=dtype, device=device)
        targets = part_views(tensors[name], place.layout, (header.shape[0] for header in place.parts), config)
        for header, target in zip(place.parts, targets, strict=True):
            copies.setdefault(header.path, []).append((header, target, place.layout))
    for path, wanted in copies.items():
        _copy_file(path, wanted)
    return tensors


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Context manager: yield a GGUF file opened for reading, or a mapped safetensors file.

    Tensors of a safetensors file keep the mapping until they are freed. Errors of reading become CheckpointError.
    """
    try:
        with path.open("rb") if is_gguf(path) else safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {str(error).splitlines()[0]}; copy the file again") from error


def map_parts(place: Placement, device: torch.device | str, dtype: torch.dtype) -> list[Tensor]:
    """Return the stored tensors of a model tensor, mapped from their files without a copy; empty if that is impossible.

    It is possible on a CPU, for tensors of a safetensors file that begin at a multiple of 4 bytes, are stored in
    `dtype`, and are neither transposed nor reordered in the model.

    Raises:
        CheckpointError: a file cannot be read, or a number is NaN or infinite.
    """
    is_wanted = torch.device(device).type == "cpu" and place.layout in (Layout.AS_IS, Layout.CONCATENATED)
    fits = (DTYPES.get(part.dtype) is dtype and part.begin % 4 == 0 and not is_gguf(part.path) for part in place.parts)
    if not (is_wanted and all(fits)):
        return []
    parts = []
    for header in place.parts:
        with opened(header.path) as file:
            parts.append(stored_tensor(file, header))
        check_finite(parts[-1], header, dtype)
    return parts


def stored_tensor(file: Any, header: TensorHeader) -> Tensor:
    """Return the tensor of `header`, or its piece at `header.index`, of an opened safetensors file. No copy."""
    if header.index is None:
        return file.get_tensor(header.name)  # type: ignore[no-any-return]
    return file.get_slice(header.name)[header.index]  # type: ignore[no-any-return]


def part_views(tensor: Tensor, layout: Layout, rows: Iterable[int], config: ModelConfig) -> tuple[Tensor, ...]:
    """Return, for each checkpoint tensor (q, k, v), the view of a model tensor (qkv) that its numbers belong in.

    rows: number of rows of each checkpoint tensor. Views of reordered heads have more dimensions than their tensors.
    """
    match layout:
        case Layout.AS_IS | Layout.ONE_ADDED:
            return (tensor,)
        case Layout.TRANSPOSED:
            return (tensor.t(),)
        case Layout.CONCATENATED:
            return tuple(torch.split(tensor, list(rows)))
        case Layout.INTERLEAVED_HEADS if config.num_kv_heads == 1:  # q of all heads, then k and v, in both
            return (tensor,)
        case Layout.INTERLEAVED_HEADS:  # model: q of all heads, then k, then v; file: q, k, v of each head
            return (tensor.view(3, config.num_heads, config.head_dim, *tensor.shape[1:]).transpose(0, 1),)
        case Layout.ROTARY_PAIRS:  # model: the first halves of a head's pairs, then the second halves; file: pairs
            *paired, value = torch.split(tensor, list(rows))
            halves = (part.view(-1, 2, config.head_dim // 2, *part.shape[1:]) for part in paired)
            return (*(half.transpose(1, 2) for half in halves), value)


def _copy_file(path: Path, wanted: list[tuple[TensorHeader, Tensor, Layout]]) -> None:
    """Copy tensors of one file to views of model tensors, in slices.

    Raises CheckpointError if the file cannot be read, or as `check_finite` does.
    """
    pending = deque((header, layout, *piece) for header, target, layout in wanted for piece in _slices(target))
    while pending:
        mapped = 0
        with opened(path) as file:
            while pending and mapped < MAPPED_BYTES:
                header, layout, target, start, stop = pending.popleft()
                rows = _read_rows(file, header, start, stop)
                check_finite(rows, header, target.dtype)
                if layout is Layout.ONE_ADDED:
                    rows = rows.float() - 1
                target.copy_(rows.reshape(target.shape))
                mapped += rows.nbytes
                del rows


def _read_rows(file: Any, header: TensorHeader, start: int, stop: int) -> Tensor:
    """Return the rows from `start` to `stop` of a stored tensor, quantized rows of a GGUF file as float32."""
    if not is_gguf(header.path):
        stored = file.get_slice(header.name)
        return stored[start:stop] if header.index is None else stored[header.index, start:stop]  # type: ignore[no-any-return]
    kind, row_bytes = TENSOR_TYPES[header.dtype], (header.end - header.begin) // header.shape[0]
    file.seek(header.begin + start * row_bytes)
    raw = np.empty((stop - start) * row_bytes, np.uint8)
    if file.readinto(raw) < len(raw):
        raise CheckpointError(f"{header.path}: has been truncated; copy the file again")
    is_plain = kind.name in DTYPES
    rows = torch.from_numpy(raw if is_plain else dequantize(kind, raw.reshape(-1, kind.bytes)))
    return (rows.view(DTYPES[kind.name]) if is_plain else rows).reshape(stop - start, *header.shape[1:])


def _slices(target: Tensor) -> Iterator[tuple[Tensor, int, int]]:
    """Cut a target tensor along its first dimension; yield each piece with the range of stored rows that fill it.

    A target of heads (shape H3DE) takes 3D stored rows for each head.
    """
    rows_each = math.prod(target.shape[1:3]) if target.dim() > 2 else 1
    step = max(1, SLICE_BYTES * len(target) // max(1, target.nbytes))
    for first in range(0, len(target), step):
        piece = target[first : first + step]
        yield piece, first * rows_each, (first + len(piece)) * rows_each


def check_finite(rows: Tensor, header: TensorHeader, dtype: torch.dtype) -> None:
    """Raise CheckpointError if rows of a stored tensor hold NaN, infinity, or numbers too large for `dtype`."""
    if not _has_bits_from(_BEYOND.get((rows.dtype, dtype), _INFINITY[rows.dtype]), rows):
        return
    if _has_bits_from(_INFINITY[rows.dtype], rows):
        raise CheckpointError(
            f"{header.path}: tensor {header.name} holds NaN or infinity; "
            "copy the file again, or take a checkpoint from before its training diverged"
        )
    name = str(dtype).removeprefix("torch.")
    raise CheckpointError(
        f"{header.path}: tensor {header.name} holds numbers that are too large for {name}; "
        "choose the dtype it was saved with"
    )


def _has_bits_from(least: int, rows: Tensor) -> bool:
    """Return True if the bits of any number, without the sign bit and read as an integer, are at least `least`.

    In IEEE 754 formats and bfloat16, a larger magnitude is a larger integer after the sign bit, with infinity and NaN
    the largest. So the largest signed integer finds positive numbers, and the largest unsigned integer negative ones.
    The two searches read 6 GB/s (one thread of a busy Zen 4); `isfinite` reads 0.1 GB/s.
    """
    is_short = rows.dtype.itemsize == 2
    signed = rows.view(torch.int16 if is_short else torch.int32).numpy().reshape(-1)
    sign = 0x8000 if is_short else 0x8000_0000
    for start in range(0, len(signed), _NUMBERS_PER_CHECK):
        piece = signed[start : start + _NUMBERS_PER_CHECK]
        if piece.max() >= least or piece.view(f"u{rows.dtype.itemsize}").max() >= sign + least:
            return True
    return False


def write_shards(
    directory: Path,
    num_bytes: Mapping[str, int],
    tensors: Iterable[Tensor],
) -> None:
    """Write tensors to one safetensors file, or to several and an index file if they exceed MAX_SHARD_BYTES together.

    Args:
        num_bytes: size of each tensor in bytes, by name, in the order of `tensors`.
        tensors: contiguous CPU tensors. The tensors of one shard are in memory at a time.
    """
    shards = plan_shards(num_bytes)
    weight_map: dict[str, str] = {}
    pending = iter(tensors)
    for number, names in enumerate(shards, start=1):
        file_name = SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        # An argument, not a variable, so that this shard is freed before the next shard is read.
        save_shard(dict(zip(names, itertools.islice(pending, len(names)), strict=True)), directory / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(num_bytes.values())}, "weight_map": weight_map}
        write_json(directory / INDEX_FILE, index)


def plan_shards(num_bytes: Mapping[str, int]) -> list[list[str]]:
    """Divide tensors into shards of at most MAX_SHARD_BYTES or one larger tensor; return each shard's tensor names."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in num_bytes.items():
        if shards[-1] and used + size > MAX_SHARD_BYTES:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def remove_shards(directory: Path) -> None:
    """Delete the weight files and the index of a checkpoint directory."""
    for pattern in (SINGLE_FILE, "model-*-of-*.safetensors", INDEX_FILE):
        for path in directory.glob(pattern):
            path.unlink()


def save_shard(tensors: dict[str, Tensor], path: Path) -> None:
    """Write one safetensors file with mode 0644: the library's default, 0600, keeps other users from reading it."""
    save_file(tensors, path, metadata={"format": "pt"})  # the transformers library requires this key
    path.chmod(0o644)
