"""Calls to the C library that Python has no function for. Torch-free."""

import ctypes
import signal
from contextlib import suppress

_LIBRARY = ctypes.CDLL(None)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_MADV_COLLAPSE = 25  # linux/mman.h


def end_with_parent() -> None:
    """Have Linux kill this process when the thread that started it ends. On other systems, do nothing."""
    if (prctl := getattr(_LIBRARY, "prctl", None)) is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Have Linux make this process the parent of its descendants whose parent ends. On other systems, do nothing."""
    if (prctl := getattr(_LIBRARY, "prctl", None)) is not None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def trim_heap() -> None:
    """Return free pages of this process's heap to the operating system; do nothing without glibc. Takes milliseconds.

    A worker keeps the memory that one step frees for the next step. Memory that only the start of the worker needed,
    such as unpacked matrices, is returned by this call.
    """
    with suppress(AttributeError):
        _LIBRARY.malloc_trim(0)


def collapse_pages(begin: int, size: int) -> None:
    """Move `size` bytes from address `begin` to huge pages; without effect before Linux 6.1. Errors are ignored.

    Unlike `mmap.madvise`, the call releases the GIL.
    """
    if (madvise := getattr(_LIBRARY, "madvise", None)) is not None:
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), ctypes.c_int(_MADV_COLLAPSE))
