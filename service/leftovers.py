"""Directories in the temporary one that a killed service has left there.

Whoever uses one holds a lock on a file in it, which the kernel lifts with the last of its processes: no process id has
to be looked up, which another container that shares the directory would not know.
"""

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

_LOCK = "in-use"


def claim(directory: Path) -> None:
    """Hold it for as long as this process lives, and what it forks."""
    descriptor = os.open(directory / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)  # closed by the kernel
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def remove_leftovers(parent: Path, prefix: str) -> None:
    """Remove the directories of that name that were claimed by somebody who is gone."""
    for directory in parent.glob(prefix + "*"):
        with suppress(OSError):  # somebody else's, or not claimed yet
            descriptor = os.open(directory / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(descriptor)
