"""Triton kernels for sampling: grammar masks, and the floor of a top_p nucleus. Needs triton and a GPU.

Neither makes the host wait: masks are read from the host's pinned memory, and a nucleus needs no sort.

Legend: B sequences, V vocabulary, R rows of masks, W words of 32 bits.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, disallow-untyped-decorators=False
# mypy: disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.system.dependent_launch import begin, launch_options

_TILE, _WARPS = 4096, 16
_WORDS = 64  # of a mask that a program reads


def masked(logits_BV: Tensor, mask_of_B: Tensor, words_RW: Tensor) -> Tensor:
    """Return a copy of the logits with -inf for each token whose bit is 0, as `mask_logits` does.

    mask_of_B: row of `words_RW` for each sequence; -1 for a sequence without a mask.
    words_RW: contiguous int32, on the GPU or in pinned memory of the host, which the kernel reads in place. The caller
        must keep pinned memory unchanged until the device has computed the kernel.
    """
    rows, size = logits_BV.shape
    out_BV = torch.empty((rows, size), dtype=logits_BV.dtype, device=logits_BV.device)
    _mask[(rows, triton.cdiv(size, 32 * _WORDS))](
        logits_BV, mask_of_B, words_RW, out_BV, logits_BV.stride(0), size, words_RW.shape[1],
        WORDS=_WORDS, num_warps=4, **launch_options(out_BV.device),
    )  # fmt: skip
    return out_BV


def complete_floors(probs_BV: Tensor, wanted_B1: Tensor, floor_B1: Tensor) -> Tensor:
    """Replace, in place, each negative floor by the probability of the least likely token of the row's nucleus.

    That is the highest floor such that the probabilities from it on add up to at least `wanted_B1`. Sums are in an
    order that depends on the vocabulary's size alone. The result is `floor_B1`.
    """
    _complete_floors[(len(probs_BV),)](
        probs_BV, wanted_B1, floor_B1, probs_BV.stride(0), probs_BV.shape[1], TILE=_TILE, num_warps=_WARPS,
        **launch_options(probs_BV.device),
    )  # fmt: skip
    return floor_B1


@triton.jit
def _complete_floors(probs, wanted, floors, stride, size, TILE: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(floors + row) < 0.0:
        wanted_mass = tl.load(wanted + row)
        bits = tl.full([], 0, tl.int32)
        # Float32 numbers from 0 on are in the order of their bits. 1.0, the largest probability, has 30.
        for bit in range(29, -1, -1):
            higher = bits | (1 << bit)
            floor = higher.to(tl.float32, bitcast=True)
            sums = tl.zeros([TILE], tl.float32)
            for start in range(0, size, TILE):
                columns = start + tl.arange(0, TILE)
                probabilities = tl.load(probs + row * stride + columns, mask=columns < size, other=0.0)
                sums += tl.where(probabilities >= floor, probabilities, 0.0)
            bits = tl.where(tl.sum(sums, 0) >= wanted_mass, higher, bits)
        tl.store(floors + row, bits.to(tl.float32, bitcast=True))


@triton.jit
def _mask(logits, mask_of, words, out, stride, size, num_words, WORDS: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    mask = tl.load(mask_of + row)
    places, bits = tl.program_id(1) * WORDS + tl.arange(0, WORDS), tl.arange(0, 32)
    columns = places[:, None] * 32 + bits[None, :]
    allowed = tl.load(words + mask * num_words + places, mask=(mask >= 0) & (places < num_words), other=-1)
    numbers = tl.load(logits + row * stride + columns, mask=columns < size, other=0.0)
    numbers = tl.where((allowed[:, None] >> bits[None, :]) & 1 != 0, numbers, float("-inf"))
    tl.store(out + row * size + columns, numbers, mask=columns < size)
