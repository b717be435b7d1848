"""Shared memory of the service's processes (phase, restarts, heartbeats), and watchdogs that check the heartbeats.

Each value has one writing process, so there is no lock that a killed process could leave locked.
"""

import contextlib
import mmap
import os
import time
from collections.abc import Callable
from ctypes import c_double, c_int, c_long
from enum import IntEnum
from pathlib import Path

from model.system.c_library import end_with_parent

# A longer gap between two checks means that the checking process itself was paused, as with a paused container.
_MAX_CHECK_GAP_SECONDS = 1.0
# Size of the values of a worker, 8 bytes for each.
_NUM_BYTES = 72


class Phase(IntEnum):
    """Phase of the service. Phases only go forward."""

    STARTING = 0
    SERVING = 1
    DRAINING = 2  # running requests finish, new requests are rejected
    STOPPING = 3  # everything ends now; child processes obey SIGTERM only in this phase


class Lifecycle:
    """State of the service: values in shared memory, which the API process inherits from main by fork."""

    def __init__(self, *, main_pid: int) -> None:
        self.main_pid = main_pid
        memory = mmap.mmap(-1, 32)
        # Written by main: a `Phase`, and its beginning in `time.monotonic()` seconds.
        self.phase = c_int.from_buffer(memory, 0)
        self.phase_seconds = c_double.from_buffer(memory, 8)
        # Written by the API process: its heartbeats, one a second, and the requests whose response is not finished.
        self.num_api_beats = c_long.from_buffer(memory, 16)
        self.num_active = c_int.from_buffer(memory, 24)

    def enter(self, phase: Phase) -> None:
        """Store the new phase of the service and the time at which it begins. Only main calls this method."""
        self.phase_seconds.value = time.monotonic()
        self.phase.value = phase

    def die_with_main(self) -> None:
        """Have the kernel kill this child process when main ends. Exit now if main has already ended."""
        end_with_parent()
        self.end_if_orphaned()

    def end_if_orphaned(self) -> None:
        """Exit this child process at once if main has ended."""
        end_if_orphaned(self.main_pid)


class WorkerState:
    """State of a worker in shared memory, kept when the worker is replaced.

    Args:
        descriptor: file descriptor of the memory, which a worker process gets from main; None: create the memory.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("kvasir-worker") if descriptor is None else descriptor
        os.ftruncate(self.descriptor, _NUM_BYTES)
        memory = mmap.mmap(self.descriptor, _NUM_BYTES)
        # Written by main: the number of restarts, the start of the last worker in `time.monotonic()` seconds, and the
        # replaced workers that a signal killed or that exited.
        self.epoch = c_int.from_buffer(memory, 0)
        self.epoch_seconds = c_double.from_buffer(memory, 8)
        self.num_killed = c_int.from_buffer(memory, 16)
        self.num_exited = c_int.from_buffer(memory, 24)
        # Written by the worker: the epochs of the last worker that read its order and of the last that became ready
        # (-1 before), and its heartbeats.
        self.ready_epoch = c_int.from_buffer(memory, 32)
        self.num_heartbeats = c_long.from_buffer(memory, 40)
        # Written by the first worker of the service: blocks of the KV-cache, which all other workers use too, and a
        # boolean. Main copies the number of blocks.
        self.num_blocks = c_int.from_buffer(memory, 48)
        self.has_standby_memory = c_int.from_buffer(memory, 56)
        self.begun_epoch = c_int.from_buffer(memory, 64)
        if descriptor is None:
            self.begun_epoch.value, self.ready_epoch.value, self.has_standby_memory.value = -1, -1, 1

    def __del__(self) -> None:
        os.close(self.descriptor)

    def beat(self) -> None:
        """Record a heartbeat of the worker, once a step, or once a second while the worker is idle."""
        self.num_heartbeats.value += 1

    @property
    def is_ready(self) -> bool:
        """True if the last worker that main has started is ready."""
        return self.ready_epoch.value == self.epoch.value

    @property
    def signs(self) -> tuple[int, int, int]:
        """Values of which any change shows a live worker: heartbeats, epoch of the last ready worker, restarts."""
        return self.num_heartbeats.value, self.ready_epoch.value, self.epoch.value


def end_if_orphaned(main_pid: int) -> None:
    """Exit this child process at once if main, its parent, has ended."""
    if os.getppid() != main_pid:
        os._exit(1)


class Watchdog:
    """Watchdog that measures how long a process is silent. A heartbeat is a change of the value that `sign` returns."""

    def __init__(self, sign: Callable[[], object], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._sign = sign
        self._clock = clock
        self._last_check_seconds = clock()
        self._last_sign: object = None
        self._silence = 0.0

    def silence(self) -> float:
        """Check for a heartbeat, and return the seconds since the last, counting at most 1 s between two calls.

        The limit keeps a pause of the watching process from looking like a silent process. Call at least once a second.
        """
        now, sign = self._clock(), self._sign()
        elapsed, self._last_check_seconds = now - self._last_check_seconds, now
        self._silence += min(elapsed, _MAX_CHECK_GAP_SECONDS)
        if sign != self._last_sign:
            self.forgive(sign)
        return self._silence

    def forgive(self, sign: object = None) -> None:
        """Reset the measured silence to 0 s, after a heartbeat or after the caller has killed the silent process."""
        self._last_sign, self._silence = sign, 0.0


def name_thread(name: str) -> None:
    """Set the Linux name, at most 15 characters, of this thread and of threads that it starts later."""
    with contextlib.suppress(OSError):  # /proc may be read-only
        Path("/proc/thread-self/comm").write_text(name)
