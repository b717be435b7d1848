"""CPU memory: weights in pages of 2 MiB, the KV-cache in pages that are allocated at their first touch.

A step reads all weights once. With pages of 4 KiB nearly every page misses the TLB: a model of 50 MB has 12,000 pages,
a TLB some thousand entries. But a page of 2 MiB is allocated whole at its first touch, and a virtual machine must first
get such a page from its host: 2.2 to 8.9 s per GB, against 0.5 s per GB in small pages. So weights are written to small
pages, and a thread moves them to large pages while the model already serves. The KV-cache stays in small pages.
"""

import ctypes
import math
import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from model.system.c_library import collapse_pages

PAGE = 2 * 2**20
_CHUNK = 16 * PAGE
_ALIGNMENT = 64  # bytes: a cache line, and the widest register


class HugePages:
    """Memory for tensors, which `enlarge` moves to huge pages. Freed with this object and the last of its tensors."""

    def __init__(self) -> None:
        self._chunks: list[mmap.mmap] = []
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a CPU tensor of zeros, in small pages until `enlarge` is called. Raises torch.OutOfMemoryError."""
        size = math.prod(shape) * dtype.itemsize
        if self._used + size > len(self._chunk):
            self._chunks.append(_map(max(size, _CHUNK)))
            _advise(self._chunks[-1], "MADV_NOHUGEPAGE")
            self._chunk, self._used = torch.frombuffer(self._chunks[-1], dtype=torch.uint8), 0
        place = self._chunk[self._used : self._used + size].view(dtype).view(shape)
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return place

    def enlarge(self) -> None:
        """Move all tensors to pages of 2 MiB; takes seconds per GB, so run it in a thread. Stops when the program ends.

        Pages that the kernel cannot move now may follow later (MADV_HUGEPAGE).
        """
        for chunk in self._chunks:
            _advise(chunk, "MADV_HUGEPAGE")
            begin = ctypes.addressof(ctypes.c_char.from_buffer(chunk))
            for offset in range(0, len(chunk), _CHUNK):
                if not threading.main_thread().is_alive():
                    return
                collapse_pages(begin + offset, min(_CHUNK, len(chunk) - offset))


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a CPU tensor of zeros. A page takes memory at the first write to it. Raises torch.OutOfMemoryError."""
    size = math.prod(shape) * dtype.itemsize
    if size < PAGE:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(_map(size), dtype=torch.uint8)[:size].view(dtype).view(shape)


def _map(size: int) -> mmap.mmap:
    """Map at least `size` bytes of zeros, in whole pages of 2 MiB. Raises torch.OutOfMemoryError."""
    try:
        return mmap.mmap(-1, -(-size // PAGE) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise torch.OutOfMemoryError(
            f"cannot allocate {size:,} bytes of CPU memory: {error}; free memory, or choose a smaller model"
        ) from error


def _advise(memory: mmap.mmap, advice: str) -> None:
    """Call madvise with the named advice ("MADV_HUGEPAGE"), if Python has this constant. Errors are ignored."""
    if hasattr(mmap, advice):
        with suppress(OSError):
            memory.madvise(getattr(mmap, advice))
