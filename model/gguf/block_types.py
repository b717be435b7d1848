"""Blocks of quantized numbers of GGUF files, unpacked to codes and scales. Torch-free.

Every type of block is w = scale * code + offset, with a scale and an offset per group of 16 or 32 numbers. In K types
they are integers, multiplied by factors of the block. The numbers equal those of llama.cpp's gguf package bit by bit.
Source: ggml-common.h and ggml-quants.c of llama.cpp.

Legend: B blocks, Y bytes of a block, W numbers of a block, G groups of a block.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from model.gguf.tensor_types import TensorType

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
_K_SCALE_BYTES = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Unpacked:
    """Quantized blocks, unpacked: number = scale * code + offset. Without `offset_BG` all offsets are 0.

    factor_B, offset_factor_B: factors of the scales and of the offsets of a block of a K type, which are integers.
    """

    codes_BW: npt.NDArray[np.int8]
    scale_BG: Floats
    offset_BG: Floats | None
    factor_B: Floats | None = None
    offset_factor_B: Floats | None = None

    def multiplied(self) -> "Unpacked":
        """Return the same numbers, with the factors multiplied into the scales and offsets."""
        if self.factor_B is None:
            return self
        offset_BG = self.offset_BG
        if offset_BG is not None and self.offset_factor_B is not None:
            offset_BG = self.offset_factor_B[:, None] * offset_BG
        return Unpacked(codes_BW=self.codes_BW, scale_BG=self.factor_B[:, None] * self.scale_BG, offset_BG=offset_BG)

    def dense(self) -> Floats:
        """Return the numbers in float32, one row for each block."""
        plain = self.multiplied()
        blocks, groups = plain.scale_BG.shape
        numbers = self.codes_BW.reshape(blocks, groups, -1).astype(np.float32)
        numbers *= plain.scale_BG[:, :, None]
        if plain.offset_BG is not None:
            numbers += plain.offset_BG[:, :, None]
        return numbers.reshape(blocks, -1)


def dequantize(kind: TensorType, raw_BY: Bytes) -> Floats:
    """Return the numbers of blocks in float32, one row for each block. A plain number is a block of one."""
    if kind.is_quantized:
        return UNPACK[kind.name](raw_BY).dense()
    if kind.name == "BF16":
        return (raw_BY.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return raw_BY.view("<f2" if kind.name == "F16" else "<f4").astype(np.float32)


def _half(raw_BY: Bytes) -> Floats:
    """Return the float16 numbers in the bytes of each block, as float32."""
    return np.ascontiguousarray(raw_BY).view("<f2").astype(np.float32)


def _nibbles(raw_BY: Bytes) -> Bytes:
    """Return the 4-bit numbers of each block: of every byte the low half, then of every byte the high half."""
    return np.concatenate([raw_BY & 15, raw_BY >> 4], axis=1)


def _high_bits(raw_BY: Bytes) -> Bytes:
    """Return the 32 bits in the 4 bytes of each block, lowest first, each as bit 4 of a code: 0 or 16."""
    return np.unpackbits(raw_BY, axis=1, bitorder="little") * np.uint8(16)


def _centered(codes_BW: Bytes, middle: int) -> npt.NDArray[np.int8]:
    return codes_BW.view(np.int8) - np.int8(middle)


def _unpack_q8_0(raw_BY: Bytes) -> Unpacked:
    codes_BW = np.ascontiguousarray(raw_BY[:, 2:]).view(np.int8)
    return Unpacked(codes_BW=codes_BW, scale_BG=_half(raw_BY[:, :2]), offset_BG=None)


def _unpack_q4_0(raw_BY: Bytes) -> Unpacked:
    codes_BW = _centered(_nibbles(raw_BY[:, 2:]), 8)
    return Unpacked(codes_BW=codes_BW, scale_BG=_half(raw_BY[:, :2]), offset_BG=None)


def _unpack_q4_1(raw_BY: Bytes) -> Unpacked:
    codes_BW = _nibbles(raw_BY[:, 4:]).view(np.int8)
    return Unpacked(codes_BW=codes_BW, scale_BG=_half(raw_BY[:, :2]), offset_BG=_half(raw_BY[:, 2:4]))


def _unpack_q5_0(raw_BY: Bytes) -> Unpacked:
    codes_BW = _centered(_nibbles(raw_BY[:, 6:]) | _high_bits(raw_BY[:, 2:6]), 16)
    return Unpacked(codes_BW=codes_BW, scale_BG=_half(raw_BY[:, :2]), offset_BG=None)


def _unpack_q5_1(raw_BY: Bytes) -> Unpacked:
    codes_BW = (_nibbles(raw_BY[:, 8:]) | _high_bits(raw_BY[:, 4:8])).view(np.int8)
    return Unpacked(codes_BW=codes_BW, scale_BG=_half(raw_BY[:, :2]), offset_BG=_half(raw_BY[:, 2:4]))


def _with_k_scales(raw_BY: Bytes, codes_BW: Bytes) -> Unpacked:
    """Return Q4_K or Q5_K blocks, with the scale and the offset of each group from their first 16 bytes.

    The 12 bytes after two float16 factors hold eight 6-bit scales and eight 6-bit minima: those of groups 0 to 3 in
    the low bits of bytes 0 to 7, and those of groups 4 to 7 in bytes 8 to 11 and in the high bits of bytes 0 to 7.
    """
    low_scale, low_minimum, high = np.split(raw_BY[:, 4 : 4 + _K_SCALE_BYTES], 3, axis=1)
    scales = np.concatenate([low_scale & 63, (high & 15) | (low_scale >> 6 << 4)], axis=1)
    minima = np.concatenate([low_minimum & 63, (high >> 4) | (low_minimum >> 6 << 4)], axis=1)
    return Unpacked(
        codes_BW=codes_BW.view(np.int8),
        scale_BG=scales.astype(np.float32),
        offset_BG=-minima.astype(np.float32),
        factor_B=_half(raw_BY[:, :2])[:, 0],
        offset_factor_B=_half(raw_BY[:, 2:4])[:, 0],
    )


def _k_nibbles(raw_BY: Bytes) -> Bytes:
    """Return the 4-bit numbers of a Q4_K or Q5_K block: of each 32 bytes the low halves, then the high halves."""
    return _nibbles(np.ascontiguousarray(raw_BY).reshape(-1, 32)).reshape(len(raw_BY), -1)


def _unpack_q4_k(raw_BY: Bytes) -> Unpacked:
    return _with_k_scales(raw_BY, _k_nibbles(raw_BY[:, 16:]))


def _unpack_q5_k(raw_BY: Bytes) -> Unpacked:
    # Byte i of the high bits holds bit g of number i in group g.
    high_BGW = raw_BY[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None] & np.uint8(1)
    codes_BW = _k_nibbles(raw_BY[:, 48:]) | (high_BGW * np.uint8(16)).reshape(len(raw_BY), -1)
    return _with_k_scales(raw_BY, codes_BW)


def _unpack_q6_k(raw_BY: Bytes) -> Unpacked:
    # Each half of a block has 64 bytes of low and 32 bytes of high bits for 128 numbers, with a scale for each 16.
    low = np.ascontiguousarray(raw_BY[:, :128]).reshape(-1, 64)
    packed = np.ascontiguousarray(raw_BY[:, 128:192]).reshape(-1, 1, 32)
    high = (packed >> np.array([0, 2, 4, 6], np.uint8)[None, :, None] & np.uint8(3)).reshape(-1, 128)
    codes_BW = _centered((_nibbles(low) | high * np.uint8(16)).reshape(len(raw_BY), -1), 32)
    scale_BG = np.ascontiguousarray(raw_BY[:, 192:208]).view(np.int8).astype(np.float32)
    return Unpacked(codes_BW=codes_BW, scale_BG=scale_BG, offset_BG=None, factor_B=_half(raw_BY[:, 208:])[:, 0])


UNPACK: Mapping[str, Callable[[Bytes], Unpacked]] = {
    "Q4_0": _unpack_q4_0,
    "Q4_1": _unpack_q4_1,
    "Q5_0": _unpack_q5_0,
    "Q5_1": _unpack_q5_1,
    "Q8_0": _unpack_q8_0,
    "Q4_K": _unpack_q4_k,
    "Q5_K": _unpack_q5_k,
    "Q6_K": _unpack_q6_k,
}
