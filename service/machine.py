"""What the service needs of the machine before it starts: found out at once, and told in a line."""

import errno
import os
import shutil
import socket
import tempfile
from ctypes import c_int
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from typing import Final

# Metrics' files of three processes are under 2 MiB, and what starts processes leaves a few sockets.
_ROOM_BYTES: Final = 8 * 2**20


def machine_fault() -> str | None:
    """Why this machine cannot run the service, and what to do, in a line; None where it can."""
    try:
        RawValue(c_int, 0)
    except OSError as error:
        return f"shared memory cannot be used ({error.strerror}); mount a tmpfs on /dev/shm"
    try:
        directory = tempfile.gettempdir()
        free = shutil.disk_usage(directory).free
    except OSError as error:
        return f"no directory for temporary files ({error.strerror}); name one that can be written in TMPDIR"
    if free < _ROOM_BYTES:
        return (
            f"{directory} has {free // 1024} KiB free, and the service needs {_ROOM_BYTES // 1024}; "
            "make room, or name another directory in TMPDIR"
        )
    return None


def port_fault(host: str, port: int) -> str | None:
    """Why nobody can listen there, found out now and not after the model is loaded; None where one can.

    Listens for a moment: binding alone succeeds beside another server that is still loading.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            reason = "is in use; choose another with --port" if error.errno == errno.EADDRINUSE else error.strerror
            return f"port {port} on {host} {reason}"
    return None


def reserve(directory: str, process: str | int) -> None:
    """Take the room of a process' files there now. A page that a full disk refuses later ends the process (SIGBUS).

    Raises:
        OSError: there is no room.
    """
    for path in Path(directory).glob(f"*_{process}.db"):
        with path.open("r+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:  # a file system that cannot promise it
                    raise
