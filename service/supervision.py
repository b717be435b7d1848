"""What main does about the deaths of others: a worker is replaced, and without the other processes the service ends."""

import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Protocol

from service.lifecycle import Lifecycle, Phase
from service.metrics import EngineState, Metrics, mark_dead
from service.standby import Standby
from service.watchdog import Watchdog

logger = logging.getLogger(__name__)

# How often main looks whether everybody lives.
POLL_SECONDS = 0.05
# More deaths in a minute than this are no accident: starting again would not end.
_MAX_WORKER_DEATHS_A_MINUTE = 5


class Launch(Protocol):
    """Starts the worker of an epoch, which waits for a word where there is one."""

    def __call__(self, epoch: int, word: Connection | None = None) -> BaseProcess: ...


class Supervisor:
    """Main's view of its children.

    Args:
        launch: starts a worker.
        fail: ends the service, for this reason.
        has_standby: a successor is kept ready.
        hang_seconds: a worker that is silent for so long is killed; 0 for never.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        metrics: Metrics,
        *,
        launch: Launch,
        fail: Callable[[str], None],
        has_standby: bool,
        hang_seconds: float,
    ) -> None:
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._launch = launch
        self._fail = fail
        self._has_standby = has_standby
        self._hang_seconds = hang_seconds
        self._deaths: deque[float] = deque(maxlen=_MAX_WORKER_DEATHS_A_MINUTE)
        self._standby = Standby(lambda word: launch(lifecycle.epoch.value + 1, word))
        self._watchdog = Watchdog(lifecycle, limit_seconds=hang_seconds)
        self._launching = threading.Lock()  # workers are replaced by one thread, and standbys kept by another

    def replace(self, dead: BaseProcess) -> BaseProcess:
        """Another worker in a dead one's place; the dead one itself where the service ends instead."""
        if self._lifecycle.phase.value == Phase.STOPPING:
            return dead
        cause, now = cause_of_death(dead), time.monotonic()
        mark_dead(dead.pid or 0)
        if len(self._deaths) == self._deaths.maxlen and now - self._deaths[0] < 60.0:
            self._fail(f"the worker died {len(self._deaths) + 1} times within a minute ({cause}); giving up")
            return dead
        self._deaths.append(now)
        logger.error("the worker %s; starting another, unfinished requests go on there", cause)
        self._metrics.count_worker_restart("signal" if (dead.exitcode or 0) < 0 else "exit")
        self._metrics.set_engine_state(EngineState.RESTARTING)
        with self._launching:
            self._lifecycle.epoch_seconds.value = now
            self._lifecycle.epoch.value += 1
            try:
                return self._standby.begin() or self._launch(self._lifecycle.epoch.value)
            except OSError as error:
                self._fail(f"no other worker can be started: {error}")
                return dead

    def watch(self, *, api: BaseProcess, queue: BaseProcess, worker: Callable[[], BaseProcess]) -> None:
        """Look after what LitServe does not watch, once.

        A worker that hangs is killed, which LitServe sees. Restarting the API process would not bring its clients'
        connections back, nor could the requests in the queue process be found again: without them the service ends.
        """
        lifecycle = self._lifecycle
        if lifecycle.phase.value == Phase.STOPPING:
            return
        if not api.is_alive():
            self._fail(f"the API process {cause_of_death(api)}")
        elif not queue.is_alive():
            self._fail(f"the queue process {cause_of_death(queue)}")
        elif self._watchdog.barks():
            logger.error("the worker made no progress for %g s; killing it", self._hang_seconds)
            worker().kill()
        elif self._has_standby and lifecycle.ready_epoch.value == lifecycle.epoch.value:
            with self._launching:
                self._standby.keep()

    def end(self) -> None:
        """Keep no standby any more."""
        with self._launching:
            self._has_standby = False
            self._standby.close()


def cause_of_death(process: BaseProcess) -> str:
    """How a process ended, in words that follow its name."""
    code = process.exitcode or 0
    if code < 0:
        name = signal.Signals(-code).name
        return f"was killed by {name}{' (out of memory?)' if code == -signal.SIGKILL else ''}"
    return f"ended with exit code {code}"
