"""Memory of the CPU: weights in pages of 2 MiB, the cache in pages that come when they are touched.

A step reads all weights once, and with pages of 4 KiB looks up every one of them anew: a table of a processor's has
some thousand entries, a model of 50 MB 12,000 pages. What runs between two steps finds that table full of weights too.

A page of 2 MiB is made whole at its first touch, which takes milliseconds where a virtual machine has to ask its host
for it: free memory in whole pages of that size is what a machine gives back to its host, the rest it keeps (measured:
2.2 to 8.9 s a GB, and 0.5 in small pages). So weights are written to small pages, and moved to large ones by a thread
while they serve already. The cache stays in small ones, which come when they are touched.
"""

import ctypes
import math
import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor

PAGE = 2 * 2**20
_CHUNK = 16 * PAGE
_ALIGNMENT = 64  # bytes: a cache line, and the widest register
_MADV_COLLAPSE = 25  # linux/mman.h, since 6.1; Python has no name for it


class HugePages:
    """Memory that is only ever added to; it lives as long as this, or a tensor in it, does."""

    def __init__(self) -> None:
        self._chunks: list[mmap.mmap] = []
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor of the CPU, in one piece, in small pages until `enlarge`.

        Raises:
            torch.OutOfMemoryError: the system gives no more.
        """
        size = tensor.nbytes
        if self._used + size > len(self._chunk):
            self._chunks.append(_map(max(size, _CHUNK)))
            _advise(self._chunks[-1], "MADV_NOHUGEPAGE")
            self._chunk, self._used = torch.frombuffer(self._chunks[-1], dtype=torch.uint8), 0
        place = self._chunk[self._used : self._used + size].view(tensor.dtype).view(tensor.shape)
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return place.copy_(tensor)

    def enlarge(self) -> None:
        """Move what is kept to pages of 2 MiB: seconds a GB, for a thread. Who reads it meanwhile may wait for a page.

        Where the kernel cannot do it now it is asked to do it in time, and where it has none, nothing happens.
        """
        for chunk in self._chunks:
            _advise(chunk, "MADV_HUGEPAGE")
            begin = ctypes.addressof(ctypes.c_char.from_buffer(chunk))
            _madvise(begin, len(chunk), _MADV_COLLAPSE)


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As `torch.zeros` on the CPU; what is never written takes no memory.

    Raises:
        torch.OutOfMemoryError: the system does not give so much.
    """
    size = math.prod(shape) * dtype.itemsize
    return torch.zeros(shape, dtype=dtype) if size < PAGE else _pages(size)[:size].view(dtype).view(shape)


def _pages(size: int) -> Tensor:
    """Zeros, uint8, of at least so many bytes. Raises torch.OutOfMemoryError."""
    return torch.frombuffer(_map(size), dtype=torch.uint8)


def _map(size: int) -> mmap.mmap:
    """Zeros of at least so many bytes. Raises torch.OutOfMemoryError."""
    try:
        return mmap.mmap(-1, -(-size // PAGE) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise torch.OutOfMemoryError(f"the system does not give {size:,} bytes: {error}") from error


def _advise(memory: mmap.mmap, advice: str) -> None:
    """Tell the kernel something by its name in C, where it is known."""
    if hasattr(mmap, advice):
        with suppress(OSError):
            memory.madvise(getattr(mmap, advice))


def _madvise_of_system() -> Callable[[int, int, int], int]:
    """The C library's, which lets other threads of Python run meanwhile, as mmap's does not."""
    found: Any = getattr(ctypes.CDLL(None), "madvise", None)
    if found is None:
        return lambda begin, size, advice: -1
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return cast(Callable[[int, int, int], int], found)


_madvise = _madvise_of_system()
