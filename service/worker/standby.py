"""Standby worker: a process that has imported a worker's libraries and waits to replace a dead worker.

Replacing a worker takes about 2 s, of which 1.5 s are process start and imports (torch). The standby worker saves these
1.5 s. It reads the weights and allocates the KV-cache only when it becomes the worker, so it holds neither while it
waits. The process is prespawned like that of the first worker, see `service.supervisor.prespawned_worker`.
"""

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

logger = logging.getLogger(__name__)

# Deaths of standby workers, or failed starts, after which no further standby is started.
_MAX_DEATHS = 3


class Standby:
    """Standby worker as seen by the main process, which starts it and promotes it to worker.

    Not thread-safe.

    Args:
        launch: starts a worker process that waits for a message on the connection, see `wait_for_word`.
    """

    def __init__(self, launch: Callable[[Connection], BaseProcess]) -> None:
        self._launch = launch
        self._process: BaseProcess | None = None
        self._word: Connection | None = None
        self._num_deaths = 0

    def keep(self) -> None:
        """Start a standby worker if none is alive."""
        if self._process is not None:
            if self._process.is_alive():
                return
            self._num_deaths += 1
            logger.warning("the standby worker died")
            self.close()
        if self._num_deaths < _MAX_DEATHS:
            theirs, self._word = get_context("spawn").Pipe()
            with theirs:
                try:
                    with _without_interrupts():
                        self._process = self._launch(theirs)
                except OSError as error:  # no memory, or too many processes: the service runs without a standby
                    self._num_deaths += 1
                    logger.warning("no standby worker can be started: %s", error)
                    self.close()

    def begin(self) -> BaseProcess | None:
        """Promote the standby worker to worker and return its process.

        Returns:
            None if there is no standby worker with completed imports. A standby worker that still imports is killed: it
            imports at the lowest priority, so on a busy machine a new worker is ready sooner.
        """
        process, word = self._process, self._word
        if process is None or word is None or not process.is_alive():
            self.close()
            return None
        try:
            if not word.poll():
                self.close()
                return None
            word.recv_bytes()
            word.send_bytes(b"begin")
        except (EOFError, OSError):  # the process died in the meantime
            self.close()
            return None
        word.close()
        self._process = self._word = None
        return process

    def close(self) -> None:
        """Kill the standby worker, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.join()
        if self._word is not None:
            self._word.close()
            self._word = None


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Block SIGINT, so that a child started within inherits the block.

    A terminal sends Ctrl-C to all processes. The signal stays pending in the child until the child ignores SIGINT.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_for_word(word: Connection) -> None:
    """Report to the main process that the imports are done, then wait for `Standby.begin`. Runs in the standby worker.

    Ends the process if the main process closes the connection.
    """
    try:
        word.send_bytes(b"imported")
        word.recv_bytes()
    except (EOFError, OSError):
        os._exit(0)
    word.close()
