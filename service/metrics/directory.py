"""Directory of prometheus_client's shared metric files: its lock, its disk space, and removal of stale directories.

A service holds a lock (flock) on a file in its directory. The kernel releases the lock when the last process of the
service ends. A process id would not work: containers that share the directory have different process ids.
"""

import errno
import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

_LOCK = "in-use"


def claim(directory: Path) -> None:
    """Lock the directory until this process and its forked children have ended."""
    descriptor = os.open(directory / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)  # closed by the kernel at exit
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def remove_stale_directories(parent: Path, prefix: str) -> None:
    """Remove the directories with this name prefix whose owner has ended."""
    for directory in parent.glob(prefix + "*"):
        with suppress(OSError):  # in use, of another user, or not claimed yet
            descriptor = os.open(directory / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(descriptor)


def reserve(directory: str, process: str | int) -> None:
    """Allocate disk space for the memory-mapped files of a process now.

    If the disk were full later, a write to a page without disk space would kill the process (SIGBUS).

    Raises:
        OSError: the disk is full.
    """
    for path in Path(directory).glob(f"*_{process}.db"):
        with path.open("r+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:  # the file system does not support allocation
                    raise
