"""Checks of the machine before the service starts: shared memory, temporary files, port, disk space."""

import errno
import shutil
import socket
import tempfile
from ctypes import c_int
from multiprocessing.sharedctypes import RawValue
from typing import Final

# The metric files of three processes take less than 2 MiB; multiprocessing adds a few sockets.
_ROOM_BYTES: Final = 8 * 2**20


def check_machine() -> str | None:
    """Return the reason why this machine cannot run the service, with a remedy, in one line; else None."""
    try:
        RawValue(c_int, 0)
    except OSError as error:
        return f"shared memory cannot be used ({error.strerror}); mount a tmpfs on /dev/shm"
    try:
        directory = tempfile.gettempdir()
        free = shutil.disk_usage(directory).free
    except OSError as error:
        return f"no directory for temporary files ({error.strerror}); set TMPDIR to a writable directory"
    if free < _ROOM_BYTES:
        return (
            f"{directory} has {free // 1024} KiB free, and the service needs {_ROOM_BYTES // 1024}; "
            "make room, or set TMPDIR to another directory"
        )
    return None


def check_port(host: str, port: int) -> str | None:
    """Return the reason why the service cannot listen on this port, else None. Checked before the model is loaded.

    Listens for a moment, because bind() alone succeeds even while another server is loading on the same port.
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
