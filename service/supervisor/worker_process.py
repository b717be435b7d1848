"""Worker process as seen by main. First worker, replacement and standby worker start in the same way.

A worker process imports torch and the engine, waits for its order (`begin`), loads the model and serves. A standby
worker is a worker process without an order yet: it holds neither weights nor KV-cache.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_PROGRAM = "import sys; sys.path[:] = {path!r}; from service.worker.worker import main; main{arguments!r}"


class WorkerProcess:
    """Worker process, started by the constructor. The kernel kills the process when the thread that started it ends.

    Args:
        checkpoint: directory of the weights to read into the page cache; None for a standby, which has low priority.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, checkpoint: Path | None) -> None:
        self._has_imported = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            arguments = (theirs.fileno(), os.getpid(), None if checkpoint is None else str(checkpoint))
            program = _PROGRAM.format(path=sys.path, arguments=arguments)
            # A process group of its own: Ctrl-C in a terminal reaches main only.
            self._process = subprocess.Popen(
                [sys.executable, "-c", program], pass_fds=[theirs.fileno()], process_group=0
            )

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        """Exit code of the worker process, negative for a signal; None while the process runs."""
        return self._process.poll()

    @property
    def sentinel(self) -> int:
        """File descriptor that becomes readable when the worker process has completed its imports or ended."""
        return self._socket.fileno()

    def has_imported(self) -> bool:
        """Return whether the worker process runs and has completed its imports."""
        if not self._has_imported:
            with suppress(OSError):  # no report yet, or the process has ended
                self._has_imported = self._socket.recv(1, socket.MSG_DONTWAIT) != b""
        return self._has_imported and self.exitcode is None

    def begin(self, order: bytes, descriptors: Sequence[int]) -> None:
        """Order the worker process to load the model and serve. If the process has died, nothing happens.

        Args:
            order: pickled `service.worker.worker.WorkerOrder`.
            descriptors: file descriptors of the shared memory and of the worker's end of the channel.
        """
        # A memory file carries the order: writing to a process that still imports could block main.
        with os.fdopen(os.memfd_create("kvasir-order"), "wb") as memory, suppress(ConnectionError):
            memory.write(order)
            memory.flush()
            socket.send_fds(self._socket, [b"b"], [memory.fileno(), *descriptors])

    def kill(self) -> None:
        """Kill the worker process and its child processes, such as compilers, which are one process group."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the worker process and wait for its end."""
        self.kill()
        self._process.wait()
        self._socket.close()
