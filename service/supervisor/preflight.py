"""Checks of the machine before the service starts: shared memory and the port."""

import errno
import socket
from ctypes import c_int
from multiprocessing.sharedctypes import RawValue


def check_machine() -> str | None:
    """Return the reason why this machine cannot run the service, with a remedy, in one line; else None."""
    try:
        RawValue(c_int, 0)
    except OSError as error:
        return f"shared memory cannot be used ({error.strerror}); mount a tmpfs on /dev/shm"
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
