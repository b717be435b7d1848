"""Supervision of the child processes by the main process.

A dead worker is replaced. If the API process dies, the service ends. A process that hangs is killed. Both processes
write heartbeats to shared memory.
"""

import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NoReturn, Protocol

from service.ipc.shared_state import Lifecycle, Phase
from service.ipc.watchdog import Watchdog
from service.worker.standby import Standby
from service.worker.worker import EXIT_SETTINGS, EXIT_START_FAILED

logger = logging.getLogger(__name__)

# Interval of heartbeat checks. The kernel reports the end of a process at once.
CHECK_SECONDS = 0.5
# A later start may take this many times as long as the first start, in addition to --hang-seconds.
_SLOWEST_START = 10.0
# The service ends at more worker deaths per minute, as restarts would go on forever.
_MAX_WORKER_DEATHS_A_MINUTE = 5


class StartError(RuntimeError):
    """The service cannot start. The message is one line; it is empty if the worker has printed the reason.

    Args:
        exit_code: exit code of the command; 2 if a setting cannot be used.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Launch(Protocol):
    """Function that starts the worker of an epoch. With `word`, it starts a standby that waits for a message."""

    def __call__(self, epoch: int, word: Connection | None = None) -> BaseProcess: ...


class Fail(Protocol):
    """Function that ends the service for the reason in `message`, and first kills `hung`, if given."""

    def __call__(self, message: str, hung: BaseProcess | None = None) -> None: ...


class Supervisor:
    """Supervisor of the child processes, in the main process.

    Args:
        launch: starts a worker.
        fail: ends the service.
        has_standby: keep a standby worker.
        hang_seconds: silence after which a process is killed; 0 for never.
        clock: returns seconds.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        *,
        launch: Launch,
        fail: Fail,
        has_standby: bool,
        hang_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lifecycle = lifecycle
        self._launch = launch
        self._fail = fail
        self._has_standby = has_standby
        self._hang_seconds = hang_seconds
        self._deaths: deque[float] = deque(maxlen=_MAX_WORKER_DEATHS_A_MINUTE)
        self._standby = Standby(lambda word: launch(lifecycle.epoch.value + 1, word))
        self._clock = clock
        self._start_seconds: float | None = None  # duration of the first worker's start
        self._api_dog = Watchdog(lambda: lifecycle.num_api_beats.value, clock=clock)
        self._worker_dog = Watchdog(lambda: lifecycle.worker_signs, clock=clock)
        self._hung: BaseProcess | None = None  # worker killed because it hung
        self._launching = threading.Lock()  # one thread replaces workers, another starts standbys

    def replace(self, dead: BaseProcess) -> BaseProcess:
        """Replace a dead worker and return the new worker; return `dead` if the service ends instead."""
        if self._lifecycle.phase.value == Phase.STOPPING:
            return dead
        cause = "was killed because it hung" if dead is self._hung else cause_of_death(dead)
        now = time.monotonic()
        if len(self._deaths) == self._deaths.maxlen and now - self._deaths[0] < 60.0:
            self._fail(f"the worker died {len(self._deaths) + 1} times within a minute ({cause}); giving up")
            return dead
        self._deaths.append(now)
        logger.error("the worker %s; starting another worker, which resumes the unfinished requests", cause)
        restarts = self._lifecycle.num_killed if (dead.exitcode or 0) < 0 else self._lifecycle.num_exited
        restarts.value += 1
        with self._launching:
            self._lifecycle.epoch_seconds.value = now
            self._lifecycle.epoch.value += 1
            try:
                return self._standby.begin() or self._launch(self._lifecycle.epoch.value)
            except (OSError, ValueError) as error:  # ValueError: main has closed its sockets
                if self._lifecycle.phase.value != Phase.STOPPING:
                    self._fail(f"no other worker can be started: {error}")
                return dead

    def keep_worker(self, workers: list[BaseProcess]) -> None:
        """Replace the worker in `workers[0]` whenever it has ended, until the service ends.

        Run in a thread of its own that outlives the workers: the kernel kills a worker when the thread that started it
        ends.
        """
        while True:
            dead = workers[0]
            while dead.is_alive():
                connection.wait([dead.sentinel], CHECK_SECONDS)
            workers[0] = self.replace(dead)
            if workers[0] is dead:
                return

    def keep_watch(self, *, api: BaseProcess, worker: Callable[[], BaseProcess]) -> NoReturn:
        """Call `watch` at intervals, and at once when `api` ends. Run it as `keep_worker` is run."""
        while True:
            self.watch(api=api, worker=worker)
            is_over = self._lifecycle.phase.value == Phase.STOPPING
            connection.wait([] if is_over else [api.sentinel], CHECK_SECONDS)

    def watch(self, *, api: BaseProcess, worker: Callable[[], BaseProcess]) -> None:
        """Check both child processes once, and start a standby worker if one is missing.

        A hung worker is killed, and `keep_worker` replaces it. The service ends without the API process: a restart
        could not restore the clients' connections.
        """
        lifecycle = self._lifecycle
        if lifecycle.phase.value == Phase.STOPPING:
            return
        if self._start_seconds is None:
            self._start_seconds = self._clock() - lifecycle.epoch_seconds.value
        if not api.is_alive():
            self._fail(f"the API process {cause_of_death(api)}")
        elif self._hang_seconds and self._end_hung(api=api, worker=worker):
            pass
        elif self._wants_standby and lifecycle.ready_epoch.value == lifecycle.epoch.value:
            with self._launching:
                self._standby.keep()

    @property
    def _wants_standby(self) -> bool:
        return self._has_standby and self._lifecycle.has_standby_memory.value != 0

    def _end_hung(self, *, api: BaseProcess, worker: Callable[[], BaseProcess]) -> bool:
        """Kill a process that has been silent for too long. Return True if there was one."""
        limit = self._hang_seconds
        if self._api_dog.silence() > limit and self._lifecycle.num_api_beats.value:
            self._fail(f"the API process sent no heartbeat for {limit:g} s", api)
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
        """Return the additional silence allowed to a worker that is still starting; 0 once it is up."""
        if self._lifecycle.ready_epoch.value == self._lifecycle.epoch.value or self._start_seconds is None:
            return 0.0
        return _SLOWEST_START * self._start_seconds

    def end(self) -> None:
        """Kill the standby worker and start no other."""
        with self._launching:
            self._has_standby = False
            self._standby.close()


def failed_start(worker: BaseProcess) -> StartError:
    """Return the error for a worker that ended before it was ready."""
    if worker.exitcode in (EXIT_START_FAILED, EXIT_SETTINGS):
        return StartError("", exit_code=2 if worker.exitcode == EXIT_SETTINGS else 1)
    return StartError(f"the worker {cause_of_death(worker)} while starting")


def cause_of_death(process: BaseProcess) -> str:
    """Describe the end of a process, as a predicate: "was killed by SIGKILL"."""
    code = process.exitcode or 0
    if code < 0:
        name = signal.Signals(-code).name
        return f"was killed by {name}{' (out of memory?)' if code == -signal.SIGKILL else ''}"
    return f"ended with exit code {code}"
