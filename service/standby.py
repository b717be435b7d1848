"""The next worker: a process that has imported what a worker needs, and waits for the present one to die.

Of the time it takes to replace a worker, most is spent on imports (a new process, torch): a second and a half of two.
The rest, to read the weights and to make the KV-cache, is done when it begins, so that it costs no KV-cache and no
device memory while it waits. The process is begun as the first worker's is: see `service.early_worker`.
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

# A standby that dies so often before it was needed is given up.
_MAX_DEATHS = 3


class Standby:
    """Main's side: it starts the process, keeps one there, and tells it to begin.

    Not thread-safe.

    Args:
        launch: starts a worker that waits for a word from this connection; see `wait_for_word`.
    """

    def __init__(self, launch: Callable[[Connection], BaseProcess]) -> None:
        self._launch = launch
        self._process: BaseProcess | None = None
        self._word: Connection | None = None
        self._num_deaths = 0

    def keep(self) -> None:
        """Have one there: start one where there is none, or it has died."""
        if self._process is not None:
            if self._process.is_alive():
                return
            self._num_deaths += 1
            logger.warning("the standby of the worker died")
            self.close()
        if self._num_deaths < _MAX_DEATHS:
            theirs, self._word = get_context("spawn").Pipe()
            with theirs:
                try:
                    with _without_interrupts():
                        self._process = self._launch(theirs)
                except OSError as error:  # no memory, or too many processes: the service goes on without
                    self._num_deaths += 1
                    logger.warning("no standby of the worker can be started: %s", error)
                    self.close()

    def begin(self) -> BaseProcess | None:
        """Make it the worker. None where there is none that has imported: one that imports in what time nobody else
        wants, on a busy machine, is behind one that begins now, and is ended."""
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
        except (EOFError, OSError):  # it died just now
            self.close()
            return None
        word.close()
        self._process = self._word = None
        return process

    def close(self) -> None:
        """End it, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.join()
        if self._word is not None:
            self._word.close()
            self._word = None


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """What is started inherits that Ctrl-C, which a terminal sends to all, waits: until it ignores it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_for_word(word: Connection) -> None:
    """The process' side, with everything imported: say so, and wait for `Standby.begin`.

    Ends the process when there is nobody left to begin for.
    """
    try:
        word.send_bytes(b"imported")
        word.recv_bytes()
    except (EOFError, OSError):
        os._exit(0)
    word.close()
