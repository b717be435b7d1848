"""Quantized matrices of a GGUF file as grouped weights.

Numbers are unchanged, except those of Q6_K: its groups of 16 are rounded to 8 bits in groups of 32.
"""

from functools import partial

import numpy as np
import torch

from model.gguf.block_types import UNPACK, Floats, Unpacked
from model.gguf.tensor_types import TENSOR_TYPES, TYPE_IDS
from model.io.files import CheckpointError, reading
from model.io.safetensors_header import TensorHeader
from model.nn.grouped_weight import GROUP_SIZE, GroupedWeight, StoredWeight

_SLICE = 2**18  # numbers that are unpacked at a time: they stay in the CPU's cache
_HALF_CODES = 8  # the codes of 4 bits are 0 to 15 in files with offsets, and -8 to 7 in grouped weights
_LARGEST = 127
_TINY = 1e-30  # keeps a group of zeros from dividing by zero


def read_grouped(header: TensorHeader) -> GroupedWeight:
    """Return a quantized matrix of a GGUF file as grouped weights, read in slices of rows.

    Raises CheckpointError if the file is truncated, or a scale or an offset is not finite.
    """
    outputs, inputs = header.shape
    kind, row_bytes = TENSOR_TYPES[header.dtype], (header.end - header.begin) // outputs
    bits = _bits(header)
    codes_FI = np.empty((outputs, inputs), np.int8)
    scale_FG = np.empty((outputs, inputs // GROUP_SIZE), np.float32)
    offset_FG = np.empty_like(scale_FG) if _has_offsets(header) else None
    step = max(1, _SLICE // inputs)
    with reading(header.path), header.path.open("rb") as file:
        file.seek(header.begin)
        for first in range(0, outputs, step):
            rows = slice(first, min(first + step, outputs))
            data = file.read((rows.stop - first) * row_bytes)
            if len(data) < (rows.stop - first) * row_bytes:
                raise CheckpointError(f"{header.path}: has been truncated; copy the file again")
            unpacked = UNPACK[kind.name](np.frombuffer(data, np.uint8).reshape(-1, kind.bytes))
            if not all(np.isfinite(x).all() for x in (unpacked.scale_BG, unpacked.offset_BG) if x is not None):
                raise CheckpointError(f"{header.path}: tensor {header.name} holds NaN or infinity; copy the file again")
            unpacked = _in_groups_of_32(unpacked)
            codes_FI[rows] = unpacked.codes_BW.reshape(-1, inputs)
            scale_FG[rows] = unpacked.scale_BG.reshape(rows.stop - first, -1)
            if offset_FG is not None and unpacked.offset_BG is not None:
                offset_FG[rows] = unpacked.offset_BG.reshape(rows.stop - first, -1)
    if bits == 4 and offset_FG is not None:
        codes_FI -= np.int8(_HALF_CODES)
        offset_FG += _HALF_CODES * scale_FG
    return GroupedWeight(
        codes_FI=torch.from_numpy(codes_FI),
        scale_FG=torch.from_numpy(scale_FG),
        offset_FG=None if offset_FG is None else torch.from_numpy(offset_FG),
        bits=bits,
    )


def map_grouped(header: TensorHeader) -> StoredWeight:
    """Return a quantized matrix of a GGUF file as the mapped file. Raises CheckpointError if the file is truncated."""
    outputs, inputs = header.shape
    try:
        with reading(header.path):
            size = header.end - header.begin
            blocks = np.memmap(header.path, np.uint8, "r", offset=header.begin, shape=(outputs, size // outputs))
    except ValueError as error:
        raise CheckpointError(f"{header.path}: has been truncated; copy the file again") from error
    return StoredWeight(
        address_F=blocks.ctypes.data + torch.arange(outputs) * blocks.shape[1],
        type_F=torch.full((outputs,), TYPE_IDS[header.dtype]),
        inputs=inputs,
        bits=_bits(header),
        has_offsets=_has_offsets(header),
        read=partial(read_grouped, header),
        files=[blocks],
    )


def _bits(header: TensorHeader) -> int:
    return 4 if header.dtype.startswith("Q4") else 8


def _has_offsets(header: TensorHeader) -> bool:
    return header.dtype not in ("Q8_0", "Q4_0", "Q5_0", "Q6_K")


def _in_groups_of_32(unpacked: Unpacked) -> Unpacked:
    """Return blocks with groups of 32: unchanged, or if they have smaller groups (Q6_K), rounded to 8 bits."""
    blocks, groups = unpacked.scale_BG.shape
    if unpacked.codes_BW.shape[1] == groups * GROUP_SIZE:
        return unpacked
    numbers = unpacked.dense().reshape(blocks, -1, GROUP_SIZE)
    scale_BG: Floats = np.maximum(np.abs(numbers).max(axis=2), _TINY) / _LARGEST
    codes = np.rint(numbers / scale_BG[:, :, None]).astype(np.int8)
    return Unpacked(codes_BW=codes.reshape(blocks, -1), scale_BG=scale_BG, offset_BG=None)
