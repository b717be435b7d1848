"""A worker's process, begun before there is anything to tell it: the first one's imports while main does.

Most of a small model's start is imports, in main and in its worker. So the command line begins the process as soon as
its settings are understood, and main hands it later what multiprocessing would have given it at its start: pickled
objects, and file descriptors, over a Unix socket. One that is not wanted in the end is killed, and none outlives main.
A standby's begins so too: nobody waits for it, so it imports in what time nobody else wants.

What is imported meanwhile must not depend on what main puts into the environment, which comes with the rest: so not
the metrics.
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

from model.parent_death import end_with_parent
from service.lifecycle import name_process

# What takes longest first.
_WORKER_IMPORTS = ("service.engine_builder", "litserve")
# Of the order's beginning: how long the environment is. Then it comes, and what multiprocessing reads.
_LENGTH_BYTES = 8
# Of the thread that imports while others serve: the last to get a processor.
_NICENESS = 19
_MAX_DESCRIPTORS = 64
_PROGRAM = "import sys; sys.path[:] = {path!r}; from service.early_worker import spawn_main; spawn_main{arguments!r}"

# In the process: the file descriptors that it was handed.
RECEIVED: list[int] = []


class Begun(NamedTuple):
    """A process that waits for its order at the other end of a socket."""

    pid: int
    channel: socket.socket

    def hand_over(self, descriptors: Sequence[int], order: bytes) -> None:
        """Give it what it waits for, and the environment; nothing where it has died, which its parent will see.

        It may import for long before it reads, and an environment may be larger than what a socket holds: so a thread
        waits for it, and not the caller.

        Args:
            descriptors: the first is that of multiprocessing's resource tracker; the process finds the others, in
                order, in `RECEIVED`.
            order: what `multiprocessing.spawn` reads.
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
    """Main's side. There is one process at most, and it is taken once.

    Args:
        imports: modules that it imports.
    """

    def __init__(self, imports: Sequence[str] = _WORKER_IMPORTS) -> None:
        self._imports = tuple(imports)
        self._begun: Begun | None = None

    def begin(self, checkpoint: Path) -> None:
        """Start the process; nothing where none can be started, which who needs one later will find out.

        The thread that calls this must live as long as main does: the kernel ends the process with it.
        """
        self._begin(str(checkpoint))

    def begin_quietly(self) -> None:
        """The same of a process that is not needed yet: what it imports takes nobody's time, and nothing is read."""
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
            # Ctrl-C reaches every process of a terminal. The new one inherits the mask, until it ignores SIGINT.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self._begun = Begun(util.spawnv_passfds(os.fsencode(command[0]), command, [theirs.fileno()]), ours)
            except OSError:
                ours.close()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def take(self) -> Begun | None:
        """The process, if there is one; from now on it is the caller's."""
        begun, self._begun = self._begun, None
        return begun

    def end(self) -> None:
        """Kill it if nobody has taken it."""
        begun = self.take()
        if begun is not None:
            os.kill(begun.pid, signal.SIGKILL)
            os.waitpid(begun.pid, 0)
            begun.channel.close()


EARLY_WORKER = EarlyWorker()


def spawn_main(descriptor: int, parent: int, checkpoint: str | None, imports: Sequence[str]) -> None:
    """The process: import, wait for the order, and be what it says. Ends with its parent.

    Args:
        checkpoint: what to read ahead; None for a process that has time.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # main drains, then ends its workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    gc.disable()  # what is imported stays, and to look through it for garbage takes an eighth of the time
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
    """Of this thread alone: a process that has given its priority away would not get it back."""
    with suppress(OSError):  # forbidden in some sandboxes
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    _import(names)


def _import(names: Sequence[str]) -> None:
    for name in names:
        with suppress(Exception):  # who needs it imports it again, and says why it cannot
            importlib.import_module(name)


def read_ahead(directory: Path) -> None:
    """Have the kernel read a checkpoint's weights while nobody needs them yet. Nothing where they are not read soon
    after, for want of memory; what is wrong with them others say."""
    with suppress(OSError, ValueError):
        paths = [path for path in sorted(directory.glob("*.safetensors")) if stat.S_ISREG(path.stat().st_mode)]
        room = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if 2 * sum(path.stat().st_size for path in paths) > room:
            return
        for path in paths:
            with path.open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
