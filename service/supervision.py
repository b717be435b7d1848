"""What main does about the deaths of others: a worker is replaced, and without the other processes the service ends.

Who hangs is as good as dead, and is killed. The worker and the API process leave signs of life in shared memory. The
queue process, which is LitServe's, is asked for one; while it does not answer, the others may be waiting for it.
"""

import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NoReturn, Protocol

from service.lifecycle import Lifecycle, Phase
from service.metrics import WORKER, Metrics, mark_dead
from service.standby import Standby
from service.watchdog import Watchdog
from service.worker import EXIT_SETTINGS, EXIT_TOLD

logger = logging.getLogger(__name__)

# How often main looks for signs of life. That a process has ended, the kernel says at once.
LOOK_SECONDS = 0.5
# How often the queue process is asked for a sign of life, and after how long without one nobody else is judged.
_ASK_SECONDS, _UNANSWERED_SECONDS = 1.0, 2.5
# How many times as long as the first a later start may take, beside what any process may be silent for.
_SLOWEST_START = 10.0
# More deaths in a minute than this are no accident: starting again would not end.
_MAX_WORKER_DEATHS_A_MINUTE = 5


class StartError(RuntimeError):
    """The service cannot start. The message, one line, says why; empty when the worker has said it.

    Args:
        exit_code: of the command, 2 where a setting cannot be used.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Launch(Protocol):
    """Starts the worker of an epoch, which waits for a word where there is one."""

    def __call__(self, epoch: int, word: Connection | None = None) -> BaseProcess: ...


class Fail(Protocol):
    """Ends the service, for this reason, and first the process that hangs where there is one."""

    def __call__(self, message: str, hung: BaseProcess | None = None) -> None: ...


class Supervisor:
    """Main's view of its children.

    Args:
        launch: starts a worker.
        fail: ends the service.
        has_standby: a successor is kept ready.
        hang_seconds: who is silent for so long is killed; 0 for never.
        clock: seconds.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        metrics: Metrics,
        *,
        launch: Launch,
        fail: Fail,
        has_standby: bool,
        hang_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._launch = launch
        self._fail = fail
        self._has_standby = has_standby
        self._hang_seconds = hang_seconds
        self._deaths: deque[float] = deque(maxlen=_MAX_WORKER_DEATHS_A_MINUTE)
        self._standby = Standby(lambda word: launch(lifecycle.epoch.value + 1, word))
        self._clock = clock
        self._num_answers = 0  # of the queue process
        self._start_seconds: float | None = None  # that the first worker took
        self._queue_dog = Watchdog(lambda: self._num_answers, clock=clock)
        self._api_dog = Watchdog(lambda: lifecycle.num_api_beats.value, clock=clock)
        self._worker_dog = Watchdog(lambda: lifecycle.worker_signs, clock=clock)
        self._hung: BaseProcess | None = None  # the worker that was killed because it hung
        self._launching = threading.Lock()  # workers are replaced by one thread, and standbys kept by another

    def replace(self, dead: BaseProcess) -> BaseProcess:
        """Another worker in a dead one's place; the dead one itself where the service ends instead."""
        if self._lifecycle.phase.value == Phase.STOPPING:
            return dead
        cause = "was killed because it hung" if dead is self._hung else cause_of_death(dead)
        now = time.monotonic()
        mark_dead(WORKER)
        if len(self._deaths) == self._deaths.maxlen and now - self._deaths[0] < 60.0:
            self._fail(f"the worker died {len(self._deaths) + 1} times within a minute ({cause}); giving up")
            return dead
        self._deaths.append(now)
        logger.error("the worker %s; starting another, unfinished requests go on there", cause)
        self._metrics.count_worker_restart("signal" if (dead.exitcode or 0) < 0 else "exit")
        with self._launching:
            self._lifecycle.epoch_seconds.value = now
            self._lifecycle.epoch.value += 1
            try:
                return self._standby.begin() or self._launch(self._lifecycle.epoch.value)
            except OSError as error:
                self._fail(f"no other worker can be started: {error}")
                return dead

    def keep_worker(self, workers: list[BaseProcess]) -> None:
        """Replace the first of `workers` whenever it has ended, until the service does.

        For a thread of its own, which lasts as long as there are workers: the kernel ends those that it starts with it.
        """
        while True:
            dead = workers[0]
            while dead.is_alive():
                connection.wait([dead.sentinel], LOOK_SECONDS)
            workers[0] = self.replace(dead)
            if workers[0] is dead:
                return

    def listen(self, ask: Callable[[], object]) -> None:
        """Note the answers of the queue process until it is gone. For a thread of its own: it may never answer."""
        with suppress(EOFError, OSError):
            while True:
                ask()
                self._num_answers += 1
                time.sleep(_ASK_SECONDS)

    def keep_watch(self, *, api: BaseProcess, queue: BaseProcess, worker: Callable[[], BaseProcess]) -> NoReturn:
        """Watch until main ends, and at once when one of them has ended. For a thread of its own: see `keep_worker`."""
        while True:
            self.watch(api=api, queue=queue, worker=worker)
            is_over = self._lifecycle.phase.value == Phase.STOPPING
            connection.wait([] if is_over else [api.sentinel, queue.sentinel], LOOK_SECONDS)

    def watch(self, *, api: BaseProcess, queue: BaseProcess, worker: Callable[[], BaseProcess]) -> None:
        """Look after what LitServe does not watch, once.

        A worker that hangs is killed, which `keep_worker` sees. Restarting the API process would not bring its clients'
        connections back, nor could the requests in the queue process be found again: without them the service ends.
        """
        lifecycle = self._lifecycle
        if lifecycle.phase.value == Phase.STOPPING:
            return
        if self._start_seconds is None:
            self._start_seconds = self._clock() - lifecycle.epoch_seconds.value
        if not api.is_alive():
            self._fail(f"the API process {cause_of_death(api)}")
        elif not queue.is_alive():
            self._fail(f"the queue process {cause_of_death(queue)}")
        elif self._hang_seconds and self._end_hung(api=api, queue=queue, worker=worker):
            pass
        elif self._wants_standby and lifecycle.ready_epoch.value == lifecycle.epoch.value:
            with self._launching:
                self._standby.keep()

    @property
    def _wants_standby(self) -> bool:
        return self._has_standby and self._lifecycle.has_standby_memory.value != 0

    def _end_hung(self, *, api: BaseProcess, queue: BaseProcess, worker: Callable[[], BaseProcess]) -> bool:
        """Kill whoever has been silent for too long. Whether there was one."""
        limit = self._hang_seconds
        if (silence := self._queue_dog.silence()) > limit:
            self._fail(f"the queue process gave no sign of life for {limit:g} s", queue)
            return True
        if silence > _UNANSWERED_SECONDS:
            return False
        if self._api_dog.silence() > limit and self._lifecycle.num_api_beats.value:
            self._fail(f"the API process gave no sign of life for {limit:g} s", api)
            return True
        limit += self._loading_seconds()
        if self._worker_dog.silence() > limit:
            logger.error("the worker made no progress for %g s; killing it", limit)
            self._worker_dog.forgive()
            self._hung = worker()
            self._hung.kill()
            return True
        return False

    def _loading_seconds(self) -> float:
        """How much longer the worker may be silent because it is not up yet."""
        if self._lifecycle.ready_epoch.value == self._lifecycle.epoch.value or self._start_seconds is None:
            return 0.0
        return _SLOWEST_START * self._start_seconds

    def end(self) -> None:
        """Keep no standby any more."""
        with self._launching:
            self._has_standby = False
            self._standby.close()


def failed_start(worker: BaseProcess) -> StartError:
    """Why a worker ended before it served, as the command's error."""
    if worker.exitcode in (EXIT_TOLD, EXIT_SETTINGS):
        return StartError("", exit_code=2 if worker.exitcode == EXIT_SETTINGS else 1)
    return StartError(f"the worker {cause_of_death(worker)} while starting")


def cause_of_death(process: BaseProcess) -> str:
    """How a process ended, in words that follow its name."""
    code = process.exitcode or 0
    if code < 0:
        name = signal.Signals(-code).name
        return f"was killed by {name}{' (out of memory?)' if code == -signal.SIGKILL else ''}"
    return f"ended with exit code {code}"
