"""Triton kernel that finds the floor of a top_p nucleus in a whole vocabulary, without a sort. Needs triton and a GPU.

A host that reads whether a sort is needed would wait for the device in each step.

Legend: B sequences, V vocabulary.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, disallow-untyped-decorators=False
# mypy: disallow-incomplete-defs=False

import triton
import triton.language as tl
from torch import Tensor

from model.system.dependent_launch import begin, launch_options

_TILE, _WARPS = 4096, 16


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
