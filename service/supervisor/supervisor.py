"""Main process: starts, watches, replaces and ends the API process and the workers, in one thread.

If the API process dies, the service ends, since a new API process could not restore the clients' connections.
"""

import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from types import FrameType

from service.config.settings import ServeSettings
from service.ipc.shared_state import Lifecycle, Phase, Watchdog, name_thread
from service.supervisor.worker_process import WorkerProcess
from service.supervisor.worker_slot import WorkerSlot, cause_of_death
from service.worker.worker import EXIT_CHECKPOINT_CHANGED, EXIT_SETTINGS, EXIT_START_FAILED

logger = logging.getLogger(__name__)

# Interval of heartbeat checks. The kernel reports the end of a process at once.
_CHECK_SECONDS = 0.5
# Interval of checks while the first workers start, and while the service drains.
_SHORT_CHECK_SECONDS = 0.005
# A later start may take this many times as long as the first start, in addition to --hang-seconds.
_SLOWEST_START = 10.0
# Deaths of standby workers, or failed starts, after which no further standby is started.
_MAX_STANDBY_DEATHS = 3
# Time limit for the API process to close its connections after the drain.
API_CLOSE_SECONDS = 5
TRACE_FLUSH_SECONDS = 2.0  # limit for sending the remaining spans, after the connections are closed


class StartError(RuntimeError):
    """Error if the service cannot start. The message is one line, or empty if the worker has printed the reason.

    `exit_code` is the exit code of the command: 2 if a setting cannot be used, else 1.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Supervisor:
    """Supervisor of the API process, the workers, and the standby that replaces the next worker that dies.

    Args:
        slots: slots of the workers. The first worker has begun.
        standby: standby that the first worker forks; None: it forks none.
        start_worker: starts another worker process; with True a standby, which imports torch at low priority.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        *,
        slots: Sequence[WorkerSlot],
        start_worker: Callable[[bool], WorkerProcess],
        start_api: Callable[[], BaseProcess],
        settings: ServeSettings,
        standby: WorkerProcess | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lifecycle = lifecycle
        self._slots = slots
        self._start_worker, self._start_api = start_worker, start_api
        self._settings = settings
        self._clock = clock
        self._api: BaseProcess | None = None
        self._standby = standby
        self._num_standby_deaths = 0
        self._start_seconds = 0.0  # duration of the first worker's start
        self._api_watchdog = Watchdog(lambda: lifecycle.num_api_beats.value, clock=clock)
        self._is_hurried = False
        self._exit_code = 0
        self._signalled = os.eventfd(0, os.EFD_NONBLOCK)

    def run(self) -> int:
        """Run the service until a signal or failure ends it. Return the exit code: 0 after a signal, 1 after a failure.

        Raises:
            StartError: a worker ended before it was ready, the port is in use, or the system lacks processes or memory.
        """
        signal.signal(signal.SIGTERM, self.on_signal)
        signal.signal(signal.SIGINT, self.on_signal)
        name_thread("kvasir-main")
        lifecycle = self._lifecycle
        try:
            if not self._start_workers():
                return 0
            if lifecycle.phase.value == Phase.STARTING:
                lifecycle.enter(Phase.SERVING)
            self._api = api = self._start_api()
            while lifecycle.phase.value != Phase.STOPPING:
                self._wait(api)
                self.check(api)
        except OSError as error:  # such as a limit of processes
            message = f"the service cannot run, because the operating system refused a resource: {error}"
            raise StartError(message) from error
        finally:
            self.end()
        return self._exit_code

    def _start_workers(self) -> bool:
        """Start all workers. Return False if a signal ends the service before they are ready.

        The first starts alone: it reports settings that cannot be used, compiles kernels, and sizes the KV-cache.
        """
        first, *others = self._slots
        if not self._wait_until_ready([first]):
            return False
        self._start_seconds = self._clock() - first.state.epoch_seconds.value
        for slot in others:
            slot.state.num_blocks.value = first.state.num_blocks.value
            self._start_in(slot)
        return self._wait_until_ready(others)

    def _wait_until_ready(self, slots: Sequence[WorkerSlot]) -> bool:
        while not all(slot.state.is_ready for slot in slots):
            if self._lifecycle.phase.value != Phase.STARTING:
                return False
            for slot in self._slots:
                if slot.exitcode is not None:
                    raise failed_start(slot)
            connection.wait([self._signalled], _SHORT_CHECK_SECONDS)
        return True

    def _start_in(self, slot: WorkerSlot) -> None:
        """Let the standby serve in a slot if the standby has completed its imports, else a new process.

        A standby that is still importing is killed: its priority is the lowest, so a new process is ready sooner.
        """
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.wait_for_fork()
            if not standby.has_imported():
                standby.close()
                standby = None
        self._standby = slot.begin(standby or self._start_worker(False), has_standby=self._wants_standby())

    def _wait(self, api: BaseProcess) -> None:
        """Wait for a signal, the end of a child process, or the time of the next heartbeat check."""
        is_draining = self._lifecycle.phase.value == Phase.DRAINING
        workers = [slot.process for slot in self._slots if slot.process is not None]
        for worker in workers:
            worker.has_imported()  # reads the report, so that the sentinel means the end of the process
        sentinels = [self._signalled, api.sentinel, *(worker.sentinel for worker in workers)]
        connection.wait(sentinels, _SHORT_CHECK_SECONDS if is_draining else _CHECK_SECONDS)
        with suppress(BlockingIOError):
            os.eventfd_read(self._signalled)

    def check(self, api: BaseProcess) -> None:
        """End the service after its drain or the API process's death. Replace dead workers, kill hung processes."""
        lifecycle = self._lifecycle
        if lifecycle.phase.value == Phase.DRAINING and self._is_drained():
            logger.info("stopping the service; unfinished requests that are cut off: %d", lifecycle.num_active.value)
            lifecycle.enter(Phase.STOPPING)
        elif not api.is_alive():
            self._fail(f"the API process {cause_of_death(api.exitcode)}; stopping the service")
        elif dead := [slot for slot in self._slots if slot.exitcode is not None]:
            for slot in dead:
                self._replace_worker(slot)
        elif self._settings.hang_seconds and self._end_hung(api):
            pass
        elif all(slot.state.is_ready for slot in self._slots):
            self._keep_standby()

    def _is_drained(self) -> bool:
        elapsed = time.monotonic() - self._lifecycle.phase_seconds.value
        return not self._lifecycle.num_active.value or self._is_hurried or elapsed > self._settings.drain_seconds

    def _replace_worker(self, slot: WorkerSlot) -> None:
        if (problem := slot.record_death()) is not None:
            self._fail(problem)
            return
        try:
            self._start_in(slot)
        except OSError as error:
            self._fail(f"no worker can be started to replace the dead worker: {error}; stopping the service")

    def _wants_standby(self) -> bool:
        """Return True if --standby is set, a standby fits into memory, and under 3 standbys died or never started."""
        has_memory = bool(self._slots[0].state.has_standby_memory.value)
        return self._settings.standby and has_memory and self._num_standby_deaths < _MAX_STANDBY_DEATHS

    def _keep_standby(self) -> None:
        """Start a standby worker if one is wanted and none is alive. End a standby that does not fit into memory."""
        if self._standby is not None:
            if self._standby.exitcode is None and self._slots[0].state.has_standby_memory.value:
                return
            if self._standby.exitcode is not None:
                self._num_standby_deaths += 1
                logger.warning("the standby worker died; the running worker is not affected")
            self._standby.close()
            self._standby = None
        if self._wants_standby():
            try:
                self._standby = self._start_worker(True)
            except OSError as error:  # no memory, or too many processes: the service runs without a standby
                self._num_standby_deaths += 1
                logger.warning("no standby worker can be started: %s; the service runs without a standby", error)

    def _end_hung(self, api: BaseProcess) -> bool:
        """Kill the API process or a worker after --hang-seconds without a heartbeat. Return True if one was killed."""
        limit = self._settings.hang_seconds
        if self._api_watchdog.silence() > limit and self._lifecycle.num_api_beats.value:
            self._fail(f"the API process sent no heartbeat for {limit:g} s; stopping the service")
            api.kill()
            return True
        limits = [
            limit + (0.0 if slot.state.is_ready else _SLOWEST_START * self._start_seconds) for slot in self._slots
        ]
        killed = [slot.kill_if_hung(most) for slot, most in zip(self._slots, limits, strict=True)]
        return any(killed)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Drain at the first SIGTERM or SIGINT, stop at the second. In a forked child, ignore both signals."""
        if os.getpid() != self._lifecycle.main_pid:
            return
        if self._lifecycle.phase.value >= Phase.DRAINING:
            self._is_hurried = True
        else:
            if self._lifecycle.phase.value == Phase.SERVING:
                num_active = self._lifecycle.num_active.value
                logger.info("draining: new requests are rejected; unfinished requests that may finish: %d", num_active)
            self._lifecycle.enter(Phase.DRAINING)
        os.eventfd_write(self._signalled, 1)

    def _fail(self, message: str) -> None:
        logger.error("%s", message)
        self._exit_code = 1
        self._lifecycle.enter(Phase.STOPPING)

    def end(self) -> None:
        """End the API process, then all worker processes, and wait for their ends."""
        self._lifecycle.enter(Phase.STOPPING)
        if self._api is not None:
            self._api.terminate()
            self._api.join(API_CLOSE_SECONDS + (TRACE_FLUSH_SECONDS if self._settings.otlp_endpoint else 0))
            self._api.kill()
            self._api.join()
        for worker in (*(slot.process for slot in self._slots), self._standby):
            if worker is not None:
                worker.close()


def check_port(host: str, port: int) -> None:
    """Check that the service can listen on its port, before the model is loaded. Raises `StartError` if not."""
    listen(host, port).close()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the port. Raises `StartError` if the port is in use or cannot be opened.

    bind() alone succeeds even while another server that has not begun to listen holds the same port.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        is_in_use = error.errno == errno.EADDRINUSE
        reason = "is in use; choose another with --port" if is_in_use else f"cannot be opened: {error.strerror}"
        raise StartError(f"port {port} on {host} {reason}") from None
    return listener


def failed_start(slot: WorkerSlot) -> StartError:
    """Return the `StartError` for a first worker process that ended before it was ready."""
    if slot.exitcode in (EXIT_START_FAILED, EXIT_SETTINGS, EXIT_CHECKPOINT_CHANGED):
        return StartError("", exit_code=2 if slot.exitcode == EXIT_SETTINGS else 1)
    return StartError(f"{slot.name} {cause_of_death(slot.exitcode)} while starting")
