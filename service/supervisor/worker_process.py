"""Worker process as seen by main. First worker, replacement and standby worker start in the same way.

A worker process imports torch and the engine, waits for the message of `begin` (its order), loads the model and
serves. A standby worker is a worker process that has no order yet: it holds neither weights nor KV-cache. Usually the
worker forks its standby when it gets its order, so that both share the memory of their imports.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import connection
from typing import Self

from model.system.c_library import adopt_orphans

# Garbage is collected when the worker serves: imported modules are no garbage, and collection takes an eighth of their
# import time.
_PROGRAM = (
    "import gc, sys; gc.disable(); sys.path[:] = {path!r}; "
    "from service.config.torch_environment import load_torch_ahead; load_torch_ahead(); "
    "from service.worker.worker import main; main{arguments!r}"
)
_REPORT_BYTES = 16  # maximum length of a process id
_REPORT_SECONDS = 1.0  # longest wait for the process id of a standby that a worker is forking, or was when it died


class WorkerProcess:
    """Worker process. The kernel kills the process when main ends.

    Args:
        control: main's end of a socket to the worker process.
        pid: process id; None for a standby that a worker forks, until the standby reports its process id.
    """

    def __init__(self, control: socket.socket, pid: int | None) -> None:
        self._socket, self._pid = control, pid
        self._has_imported = False
        self._exitcode: int | None = None
        self._is_reaped = False

    @classmethod
    def start(cls, *, is_standby: bool = False) -> Self:
        """Start a new interpreter as a worker process. Raises `OSError` if no process can be started.

        is_standby: the process imports at low priority.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = theirs.fileno(), os.getpid(), is_standby
            command = [sys.executable, "-c", _PROGRAM.format(path=sys.path, arguments=arguments)]
            # A process group of its own: Ctrl-C in a terminal reaches main only.
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], process_group=0)
        process.returncode = 0  # `WorkerProcess` waits for the process, not `Popen`
        return cls(ours, process.pid)

    @property
    def pid(self) -> int:
        """Process id of the worker process, which a forked standby must have reported."""
        assert self._pid is not None, "the worker process has reported its process id"
        return self._pid

    @property
    def exitcode(self) -> int | None:
        """Exit code of the worker process, negative for a signal; None while the process runs."""
        self._read_report()
        if self._exitcode is None and self._pid is not None:
            self._wait(os.WNOHANG)
        return self._exitcode

    @property
    def sentinel(self) -> int:
        """File descriptor that becomes readable when the worker process has completed its imports or ended."""
        return self._socket.fileno()

    def has_imported(self) -> bool:
        """Return whether the worker process runs and has completed its imports."""
        return self.exitcode is None and self._has_imported

    @property
    def has_ever_imported(self) -> bool:
        """True if the worker process has completed its imports, even if it has ended since."""
        return self._has_imported

    def begin(self, order: bytes, descriptors: Sequence[int], *, has_standby: bool) -> "WorkerProcess | None":
        """Send the worker process the message to load the model and serve. If the process has died, nothing is sent.

        Args:
            order: pickled `service.worker.worker.WorkerOrder`.
            descriptors: file descriptors of the shared memory and of the worker's end of the channel.
            has_standby: the worker process forks a standby first. Main becomes the standby's parent.
        Returns the standby, or None without one.
        """
        if not has_standby:
            self.send(order, descriptors)
            return None
        ours, theirs = socket.socketpair()
        with theirs:
            adopt_orphans()
            self.send(order, [*descriptors, theirs.fileno()])
        return WorkerProcess(ours, pid=None)

    def send(self, content: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send the worker process a message, after its order the pickled `VerifiedCheckpoint`.

        A memory file carries the content, because writing to a process that still imports could block main.
        """
        with os.fdopen(os.memfd_create("kvasir-order"), "wb") as memory, suppress(ConnectionError):
            memory.write(content)
            memory.flush()
            socket.send_fds(self._socket, [b"b"], [memory.fileno(), *descriptors])

    def wait_for_fork(self) -> None:
        """Wait until a standby that a worker is forking has reported its process id, or ended."""
        if self._pid is None and self._exitcode is None:
            connection.wait([self._socket], _REPORT_SECONDS)

    def kill(self) -> None:
        """Kill the process group of the worker process: the worker and its child processes, such as compilers."""
        self._read_report()
        if self._pid is not None and not self._is_reaped:
            with suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the worker process and its child processes, and wait for their ends. Main has adopted the children."""
        self.wait_for_fork()
        self.kill()
        if self._pid is not None and not self._is_reaped:
            self._wait(0)
            with suppress(ChildProcessError):
                while True:
                    os.waitpid(-self._pid, 0)
            self._is_reaped = True
        self._socket.close()

    def _read_report(self) -> None:
        """Read the process id, which the worker process sends when it has completed its imports."""
        if self._has_imported or self._exitcode is not None or self._socket.fileno() < 0:
            return
        with suppress(BlockingIOError):  # no report yet
            try:
                report = self._socket.recv(_REPORT_BYTES, socket.MSG_DONTWAIT)
            except ConnectionError:
                report = b""
            if report:
                self._pid, self._has_imported = int(report), True
            elif self._pid is None:  # the worker has ended before it forked this standby
                self._exitcode = -signal.SIGKILL

    def _wait(self, options: int) -> None:
        """Wait for the process to end (WNOHANG: only check), and set the exit code. `close` frees the process id."""
        assert self._pid is not None
        ended = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT | options)
        if ended is not None:
            self._exitcode = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
