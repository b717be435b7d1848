"""Quantized matrices of a GGUF file as grouped weights.

Numbers are unchanged, with one exception: where a matrix joins Q6_K with a type that is not a K type, the groups of 16
of Q6_K are rounded to 8 bits in groups of 32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from model.gguf.block_types import UNPACK, Floats, Unpacked
from model.gguf.tensor_types import TENSOR_TYPES, TYPE_IDS, joint_bits
from model.io.files import CheckpointError, reading
from model.io.safetensors_header import TensorHeader
from model.nn.grouped_weight import BLOCK_SIZE, GROUP_SIZE, SMALL_GROUP_SIZE, GroupedWeight, StoredWeight

_SLICE = 2**18  # numbers that are unpacked at a time: they stay in the CPU's cache
_HALF_CODES = 8  # the codes of 4 bits are 0 to 15 in files with offsets, and -8 to 7 in grouped weights
_LARGEST = 127
_TINY = 1e-30  # keeps a group of zeros from dividing by zero


def read_grouped(headers: Sequence[TensorHeader]) -> GroupedWeight:
    """Return quantized matrices of a GGUF file as one grouped weight: the rows of all matrices, in order.

    Raises CheckpointError if the file is truncated, or a scale, an offset or a factor is not finite.
    """
    bits, has_offset = _format(headers)
    outputs, inputs = sum(header.shape[0] for header in headers), headers[0].shape[1]
    number, group = (np.int8, SMALL_GROUP_SIZE) if bits == 6 else (np.float32, GROUP_SIZE)
    arrays: dict[str, npt.NDArray[Any]] = {
        "codes_BW": np.empty((outputs, inputs), np.int8),
        "scale_BG": np.empty((outputs, inputs // group), number),
    }
    if has_offset:
        arrays["offset_BG"] = np.zeros((outputs, inputs // GROUP_SIZE), number)
    if bits == 6:
        arrays["factor_B"] = np.empty((outputs, inputs // BLOCK_SIZE), np.float16)
        if has_offset:
            arrays["offset_factor_B"] = np.zeros_like(arrays["factor_B"])
    first = 0
    for header in headers:
        _read_rows(header, bits, {name: array[first : first + header.shape[0]] for name, array in arrays.items()})
        first += header.shape[0]
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return GroupedWeight(
        codes_FI=tensors["codes_BW"],
        scale_FG=tensors["scale_BG"],
        offset_FG=tensors.get("offset_BG"),
        bits=bits,
        factor_FB=tensors.get("factor_B"),
        offset_factor_FB=tensors.get("offset_factor_B"),
    )


def map_grouped(headers: Sequence[TensorHeader]) -> StoredWeight:
    """Return the weights of `read_grouped`, mapped and not unpacked.

    Raises CheckpointError if the file is truncated.
    """
    files, addresses, types = [], [], []
    for header in headers:
        outputs, size = header.shape[0], header.end - header.begin
        with reading(header.path):
            try:
                blocks = np.memmap(header.path, np.uint8, "r", offset=header.begin, shape=(outputs, size // outputs))
            except ValueError as error:
                raise CheckpointError(f"{header.path}: has been truncated; copy the file again") from error
        files.append(blocks)
        addresses.append(blocks.ctypes.data + torch.arange(outputs) * blocks.shape[1])
        types.append(torch.full((outputs,), TYPE_IDS[header.dtype]))
    bits, has_offsets = _format(headers)
    return StoredWeight(
        address_F=torch.cat(addresses),
        type_F=torch.cat(types),
        inputs=headers[0].shape[1],
        bits=bits,
        has_offsets=has_offsets,
        read=partial(read_grouped, headers),
        files=files,
    )


def _format(headers: Sequence[TensorHeader]) -> tuple[int, bool]:
    """Return the bits of a code of a matrix, and True if it has offsets. headers: the matrix's parts."""
    names = [header.dtype for header in headers]
    return joint_bits(names), any(TENSOR_TYPES[name].has_offset for name in names)


def _read_rows(header: TensorHeader, bits: int, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Read a matrix into arrays, which have the names of fields of `Unpacked`."""
    outputs, inputs = header.shape
    kind, row_bytes = TENSOR_TYPES[header.dtype], (header.end - header.begin) // outputs
    step = max(1, _SLICE // inputs)
    with reading(header.path), header.path.open("rb") as file:
        file.seek(header.begin)
        for first in range(0, outputs, step):
            rows = slice(first, min(first + step, outputs))
            data = file.read((rows.stop - first) * row_bytes)
            if len(data) < (rows.stop - first) * row_bytes:
                raise CheckpointError(f"{header.path}: has been truncated; copy the file again")
            unpacked = UNPACK[kind.name](np.frombuffer(data, np.uint8).reshape(-1, kind.bytes))
            floats = unpacked.scale_BG, unpacked.offset_BG, unpacked.factor_B, unpacked.offset_factor_B
            if not all(np.isfinite(x).all() for x in floats if x is not None):
                raise CheckpointError(f"{header.path}: tensor {header.name} holds NaN or infinity; copy the file again")
            unpacked = _convert(unpacked, bits)
            for name, array in arrays.items():
                if (part := getattr(unpacked, name)) is not None:
                    array[rows] = part.reshape(rows.stop - first, -1)


def _convert(unpacked: Unpacked, bits: int) -> Unpacked:
    """Convert unpacked blocks to the codes and the group size of grouped weights with this number of bits."""
    groups = unpacked.scale_BG.shape[1]
    if bits == 6:  # the groups of all types become as small as those of Q6_K
        times = unpacked.codes_BW.shape[1] // groups // SMALL_GROUP_SIZE
        return replace(unpacked, scale_BG=unpacked.scale_BG.repeat(times, axis=1))
    unpacked = unpacked.multiplied()
    if unpacked.codes_BW.shape[1] < groups * GROUP_SIZE:
        numbers = unpacked.dense().reshape(len(unpacked.codes_BW), -1, GROUP_SIZE)
        scale_BG: Floats = np.maximum(np.abs(numbers).max(axis=2), _TINY) / _LARGEST
        codes = np.rint(numbers / scale_BG[:, :, None]).astype(np.int8)
        return Unpacked(codes_BW=codes.reshape(len(numbers), -1), scale_BG=scale_BG, offset_BG=None)
    if bits == 4 and unpacked.offset_BG is not None:
        codes_BW = unpacked.codes_BW - np.int8(_HALF_CODES)
        return replace(unpacked, codes_BW=codes_BW, offset_BG=unpacked.offset_BG + _HALF_CODES * unpacked.scale_BG)
    return unpacked
