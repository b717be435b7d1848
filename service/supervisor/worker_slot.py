"""One of the service's workers, with its replacements: their start, deaths and hangs."""

import logging
import signal
import time
from collections import deque
from collections.abc import Callable

from service.ipc.shared_state import Watchdog, WorkerState
from service.supervisor.worker_process import WorkerProcess
from service.worker.worker import EXIT_CHECKPOINT_CHANGED

logger = logging.getLogger(__name__)

# The service ends at more deaths of one worker per minute, as restarts would go on forever.
_MAX_DEATHS_A_MINUTE = 5
# Likely causes of deaths by a signal, by its name. Reading beyond the end of a mapped file raises SIGBUS.
_LIKELY_CAUSES = {
    "SIGKILL": " (out of memory?)",
    "SIGBUS": " (was a file of the checkpoint truncated, or could its disk not be read?)",
}


class WorkerSlot:
    """Slot that holds a worker process, and after the process's death its replacement.

    Args:
        state: shared memory of all workers of this slot.
        send_order: sends a worker process the message to load the model and serve; with True the process first forks a
            standby, which `send_order` returns.
        name: name of the slot's workers in log lines.
    """

    def __init__(
        self,
        state: WorkerState,
        send_order: Callable[[WorkerProcess, bool], WorkerProcess | None],
        *,
        name: str = "the worker",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state, self.name = state, name
        self.process: WorkerProcess | None = None
        self._send_order, self._clock = send_order, clock
        self._watchdog = Watchdog(lambda: state.signs, clock=clock)
        self._deaths: deque[float] = deque(maxlen=_MAX_DEATHS_A_MINUTE)
        self._hung: WorkerProcess | None = None  # process that was killed because it hung
        self._verified: bytes | None = None  # pickled `VerifiedCheckpoint`

    @property
    def exitcode(self) -> int | None:
        """Exit code of the worker process; None while the process runs, or before the first process."""
        return None if self.process is None else self.process.exitcode

    def begin(self, process: WorkerProcess, *, has_standby: bool) -> WorkerProcess | None:
        """Let a process serve as this slot's worker. Return the standby that the process forks first, if wanted."""
        self.process = process
        self.state.epoch_seconds.value = self._clock()
        standby = self._send_order(process, has_standby)
        if self._verified is not None:
            process.send(self._verified)
        return standby

    def confirm(self, verified: bytes) -> None:
        """Send the worker, and later its replacements, the pickled `VerifiedCheckpoint`, which they wait for."""
        self._verified = verified
        if self.process is not None:
            self.process.send(verified)

    def record_death(self) -> str | None:
        """Count the death of the worker, whose replacement can then begin. Return a message if it must not be replaced.

        A worker is not replaced after six deaths within a minute, or if the checkpoint has changed. A standby that died
        together with the worker that it replaces counts as no further death.
        """
        dead, state, now = self.process, self.state, self._clock()
        assert dead is not None
        if dead.has_ever_imported and state.begun_epoch.value < state.epoch.value:
            logger.warning("the standby worker died before it could replace %s; starting another worker", self.name)
            dead.close()
            return None
        cause = "was killed because it hung" if dead is self._hung else cause_of_death(dead.exitcode)
        if len(self._deaths) == self._deaths.maxlen and now - self._deaths[0] < 60.0:
            return f"{self.name} died {len(self._deaths) + 1} times within a minute ({cause}); giving up"
        if dead.exitcode == EXIT_CHECKPOINT_CHANGED:
            return f"{self.name} cannot be replaced, because the checkpoint has changed; restart the service"
        self._deaths.append(now)
        logger.error("%s %s; starting another worker, which resumes the unfinished requests", self.name, cause)
        restarts = state.num_killed if (dead.exitcode or 0) < 0 else state.num_exited
        restarts.value += 1
        state.epoch_seconds.value = now
        state.epoch.value += 1
        dead.close()
        return None

    def kill_if_hung(self, max_silence_seconds: float) -> bool:
        """Kill the worker process if its last heartbeat is older than the limit. Return True if it was killed."""
        if self.process is None or self._watchdog.silence() <= max_silence_seconds:
            return False
        message = "%s sent no heartbeat for %g s; killing the worker and starting another"
        logger.error(message, self.name, max_silence_seconds)
        self._watchdog.forgive()
        self._hung = self.process
        self.process.kill()
        return True


def cause_of_death(exitcode: int | None) -> str:
    """Describe the end of a process by its exit code, as a predicate: "was killed by SIGKILL"."""
    if exitcode is not None and exitcode < 0:
        name = {each.value: each.name for each in signal.Signals}.get(-exitcode, f"signal {-exitcode}")
        return f"was killed by {name}{_LIKELY_CAUSES.get(name, '')}"
    return f"ended with exit code {exitcode or 0}"
