"""What was freed goes back to the system: torch-free.

A process that serves keeps what a step frees for the next one (`service.engine_builder.keep_freed_memory`). What only
its start needed, such as matrices that have been packed, would stay with it for ever.
"""

import ctypes
from contextlib import suppress


def give_back_freed_memory() -> None:
    """Let the system have all whole pages that the C library holds for nobody; milliseconds. Nothing without glibc."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
