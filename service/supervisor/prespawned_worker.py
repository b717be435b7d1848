"""Prespawned worker: a process that imports its modules before it gets its work.

Imports take most of a small model's start time, in main and in the worker. The command line therefore starts the
worker's process as soon as the settings are parsed, and both import at the same time. Main later sends what
multiprocessing would have passed at the start, over a Unix socket: the environment, pickled objects, file descriptors.
An unused process is killed, and no process outlives main. The standby worker is prespawned too, and imports at low
priority.

The prespawned process must not import modules that read environment variables which main sets later.
"""

import gc
import importlib
import json
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import spawn, util
from pathlib import Path
from typing import NamedTuple

from model.system.parent_death import end_with_parent
from service.ipc.shared_state import name_process

# The slowest import comes first.
_WORKER_IMPORTS = ("service.worker.engine_factory", "litserve")
# Length of the message's first field, which is the size of the environment. The environment and the data that
# multiprocessing reads follow.
_LENGTH_BYTES = 8
# Nice value of the standby's importing thread: the lowest priority, so that serving processes get the CPU first.
_NICENESS = 19
_MAX_DESCRIPTORS = 64
_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; "
    "from service.supervisor.prespawned_worker import spawn_main; spawn_main{arguments!r}"
)

# File descriptors that this process has received from main.
RECEIVED: list[int] = []


class Begun(NamedTuple):
    """Prespawned process that waits for its work at the other end of a socket."""

    pid: int
    channel: socket.socket

    def hand_over(self, descriptors: Sequence[int], order: bytes) -> None:
        """Send the process its work and the environment. A dead process is ignored here: its parent will notice.

        A thread sends the data, so that the caller does not block. The process may import for seconds before it reads,
        and the environment may be larger than the socket's buffer.

        Args:
            descriptors: file descriptors to send. The first is the one of multiprocessing's resource tracker. The
                process finds the rest in `RECEIVED`, in order.
            order: data for `multiprocessing.spawn`.
        """
        encoded = json.dumps(dict(os.environ)).encode()
        with suppress(ConnectionError):
            socket.send_fds(self.channel, [len(encoded).to_bytes(_LENGTH_BYTES, "big")], descriptors)
            own = self.channel.dup()
            threading.Thread(target=_send, args=(own, encoded + order), name="hand-over", daemon=True).start()


def _send(channel: socket.socket, order: bytes) -> None:
    with channel, suppress(ConnectionError):
        channel.sendall(order)


class EarlyWorker:
    """Main's handle on at most one prespawned process.

    Args:
        imports: modules for the process to import.
    """

    def __init__(self, imports: Sequence[str] = _WORKER_IMPORTS) -> None:
        self._imports = tuple(imports)
        self._begun: Begun | None = None

    def begin(self, checkpoint: Path) -> None:
        """Start the process, and have the checkpoint read ahead. On failure there is no process, and no error.

        The calling thread must live as long as main, since the kernel kills the process when that thread ends.
        """
        self._begin(str(checkpoint))

    def begin_quietly(self) -> None:
        """Start a process that is not needed yet: it imports at low priority and reads no checkpoint ahead."""
        self._begin(None)

    def _begin(self, checkpoint: str | None) -> None:
        try:
            ours, theirs = socket.socketpair()
        except OSError:
            return
        with theirs:
            command = spawn.get_command_line()
            arguments = (theirs.fileno(), os.getpid(), checkpoint, self._imports)
            command[command.index("-c") + 1] = _PROGRAM.format(path=sys.path, arguments=arguments)
            # Ctrl-C reaches every process of a terminal. The new process inherits this mask until it ignores SIGINT.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self._begun = Begun(util.spawnv_passfds(os.fsencode(command[0]), command, [theirs.fileno()]), ours)
            except OSError:
                ours.close()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def take(self) -> Begun | None:
        """Return the process, if there is one, and hand over its ownership to the caller."""
        begun, self._begun = self._begun, None
        return begun

    def end(self) -> None:
        """Kill the process, unless `take` has returned it."""
        begun = self.take()
        if begun is not None:
            os.kill(begun.pid, signal.SIGKILL)
            os.waitpid(begun.pid, 0)
            begun.channel.close()


EARLY_WORKER = EarlyWorker()


def spawn_main(descriptor: int, parent: int, checkpoint: str | None, imports: Sequence[str]) -> None:
    """Run the prespawned process: import, wait for the work, and run it. The process ends with its parent.

    Args:
        checkpoint: checkpoint to read ahead; None for a process that imports at low priority.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # main drains, then ends its workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    gc.disable()  # imported modules are no garbage, and collection takes an eighth of the import time
    if checkpoint is None:
        name_process("kvasir-importer")
        importing = threading.Thread(target=_import_quietly, args=(imports,), name="importing")
        importing.start()
        importing.join()
    else:
        threading.Thread(target=read_ahead, args=(Path(checkpoint),), name="read-ahead", daemon=True).start()
        _import(imports)
    gc.freeze()
    gc.enable()
    with socket.socket(fileno=descriptor) as inbox:
        start, descriptors, _, _ = socket.recv_fds(inbox, _LENGTH_BYTES, _MAX_DESCRIPTORS)
        if len(start) < _LENGTH_BYTES:
            os._exit(1)
        os.environ.update(json.loads(inbox.recv(int.from_bytes(start, "big"), socket.MSG_WAITALL)))
        tracker, *RECEIVED[:] = descriptors
        spawn.spawn_main(inbox.detach(), tracker_fd=tracker)


def _import_quietly(names: Sequence[str]) -> None:
    """Import modules at the lowest priority, which only this thread gets: a process cannot raise its priority again."""
    with suppress(OSError):  # forbidden in some sandboxes
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    _import(names)


def _import(names: Sequence[str]) -> None:
    for name in names:
        with suppress(Exception):  # the worker imports the module again, and then reports the error
            importlib.import_module(name)


def read_ahead(directory: Path) -> None:
    """Have the kernel read a checkpoint's weights into the page cache before the worker needs them.

    Nothing is read ahead if twice the weights exceed the available memory. Errors are left to the loader to report.
    """
    with suppress(OSError, ValueError):
        paths = [path for path in sorted(directory.glob("*.safetensors")) if stat.S_ISREG(path.stat().st_mode)]
        room = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if 2 * sum(path.stat().st_size for path in paths) > room:
            return
        for path in paths:
            with path.open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
