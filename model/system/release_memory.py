"""Return of freed memory to the operating system. Torch-free.

A serving process keeps the memory that one step frees for the next step
(`service.worker.engine_factory.keep_freed_memory`). Memory that only its start needed, such as unpacked matrices, would
otherwise stay with the process for ever.
"""

import ctypes
from contextlib import suppress


def trim_heap() -> None:
    """Return the C library's free whole pages to the system; takes milliseconds. Does nothing without glibc."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
