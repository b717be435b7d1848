"""Memory of the CPU: weights in pages of 2 MiB, the cache in pages that come when they are touched.

A step reads all weights once, and with pages of 4 KiB looks up every one of them anew: a table of a processor's has
some thousand entries, a model of 50 MB 12,000 pages. What runs between two steps finds that table full of weights too.

The cache has small ones: a page of 2 MiB is made whole at its first touch, which takes milliseconds where a virtual
machine has to ask its host for it, while somebody waits. To touch all of a cache at the start takes seconds there.
"""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

PAGE = 2 * 2**20
_CHUNK = 16 * PAGE
_ALIGNMENT = 64  # bytes: a cache line, and the widest register


class HugePages:
    """Memory that is only ever added to; it lives as long as this, or a tensor in it, does."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor of the CPU, in one piece.

        Raises:
            torch.OutOfMemoryError: the system gives no more.
        """
        size = tensor.nbytes
        if self._used + size > len(self._chunk):
            self._chunk, self._used = _pages(max(size, _CHUNK), are_huge=True), 0
        place = self._chunk[self._used : self._used + size].view(tensor.dtype).view(tensor.shape)
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return place.copy_(tensor)


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As `torch.zeros` on the CPU; what is never written takes no memory.

    Raises:
        torch.OutOfMemoryError: the system does not give so much.
    """
    size = math.prod(shape) * dtype.itemsize
    return torch.zeros(shape, dtype=dtype) if size < PAGE else _pages(size)[:size].view(dtype).view(shape)


def _pages(size: int, *, are_huge: bool = False) -> Tensor:
    """Zeros, uint8, of at least so many bytes. Raises torch.OutOfMemoryError."""
    try:
        memory = mmap.mmap(-1, -(-size // PAGE) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise torch.OutOfMemoryError(f"the system does not give {size:,} bytes: {error}") from error
    if are_huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them: small ones do
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
