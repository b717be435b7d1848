"""State shared by all processes of the service, and watchdogs over its heartbeats.

Each word has one writer. No word needs a lock that a killed process could leave locked.
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
_MOST_BETWEEN_LOOKS = 1.0


# Size of the shared words, each in 8 bytes.
_NUM_BYTES = 96


class Phase(IntEnum):
    """Phase of the service. Phases only go forward."""

    STARTING = 0
    SERVING = 1
    DRAINING = 2  # running requests finish, new requests are rejected
    STOPPING = 3  # everything ends now; child processes obey SIGTERM only in this phase


class Lifecycle:
    """Words shared by main, the API process (by fork) and the workers (by file descriptor).

    phase: a `Phase`; written by main.
    phase_seconds: `time.monotonic()` at which the phase began; written by main.
    epoch: number of worker restarts; written by main.
    num_killed, num_exited: replaced workers that a signal killed, or that exited; written by main.
    epoch_seconds: `time.monotonic()` of the last start of a worker; written by main.
    ready_epoch: the epoch of the last worker that was ready to serve, -1 before; written by the worker.
    num_heartbeats: heartbeats of the worker, one per step, or one per second while idle; written by the worker.
    num_api_beats: heartbeats of the API process, one per second; written by the API process.
    num_active: requests to the engine whose response is not finished; written by the API process.
    num_blocks: blocks of the KV-cache, 0 before the first worker has set it. Later workers use the same number.
    has_standby_memory: 0 if memory does not suffice for a standby worker; written by the first worker.

    Args:
        main_pid: process id of main.
        descriptor: memory file of main's object; None creates the memory.
    """

    def __init__(self, *, main_pid: int, descriptor: int | None = None) -> None:
        self.main_pid = main_pid
        self.descriptor = os.memfd_create("kvasir-lifecycle") if descriptor is None else descriptor
        os.ftruncate(self.descriptor, _NUM_BYTES)
        memory = mmap.mmap(self.descriptor, _NUM_BYTES)
        self.phase = c_int.from_buffer(memory, 0)
        self.phase_seconds = c_double.from_buffer(memory, 8)
        self.epoch = c_int.from_buffer(memory, 16)
        self.num_killed = c_int.from_buffer(memory, 24)
        self.num_exited = c_int.from_buffer(memory, 32)
        self.epoch_seconds = c_double.from_buffer(memory, 40)
        self.ready_epoch = c_int.from_buffer(memory, 48)
        self.num_heartbeats = c_long.from_buffer(memory, 56)
        self.num_api_beats = c_long.from_buffer(memory, 64)
        self.num_active = c_int.from_buffer(memory, 72)
        self.num_blocks = c_int.from_buffer(memory, 80)
        self.has_standby_memory = c_int.from_buffer(memory, 88)
        if descriptor is None:
            self.ready_epoch.value, self.has_standby_memory.value = -1, 1

    def __del__(self) -> None:
        os.close(self.descriptor)

    def enter(self, phase: Phase) -> None:
        """Begin a phase; main only."""
        self.phase_seconds.value = time.monotonic()
        self.phase.value = phase

    def beat(self) -> None:
        """Record a heartbeat of the worker; the worker only."""
        self.num_heartbeats.value += 1

    @property
    def worker_signs(self) -> tuple[int, int, int]:
        """Values that change while the worker lives, for a `Watchdog`: heartbeats and worker restarts."""
        return self.num_heartbeats.value, self.ready_epoch.value, self.epoch.value

    def record_api_heartbeat(self) -> None:
        """Record a heartbeat of the API process; the API process only."""
        self.num_api_beats.value += 1

    def die_with_main(self) -> None:
        """Have the kernel kill this child process when main ends. Exit now if main is already gone.

        The kernel treats a thread as the parent. The thread of main that started this process must live as long as
        main.
        """
        end_with_parent()
        self.end_if_orphaned()

    def end_if_orphaned(self) -> None:
        """Exit if main is gone."""
        if os.getppid() != self.main_pid:
            os._exit(1)


class Watchdog:
    """Watchdog of one process. Call `silence` more than once a second.

    Args:
        sign: returns a value that changes with each heartbeat.
        clock: returns seconds.
    """

    def __init__(self, sign: Callable[[], object], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._sign = sign
        self._clock = clock
        self._last_look = clock()
        self._last_sign: object = None
        self._silence = 0.0

    def silence(self) -> float:
        """Return the seconds since the last heartbeat. Of the time between two calls at most 1 s counts.

        So a pause of the watchdog itself is not taken for a silent process.
        """
        now, sign = self._clock(), self._sign()
        elapsed, self._last_look = now - self._last_look, now
        self._silence += min(elapsed, _MOST_BETWEEN_LOOKS)
        if sign != self._last_sign:
            self.forgive(sign)
        return self._silence

    def forgive(self, sign: object = None) -> None:
        """Reset the silence to 0, after the caller has acted upon it."""
        self._last_sign, self._silence = sign, 0.0


def name_thread(name: str) -> None:
    """Set the name of this thread, at most 15 characters. The main thread's name is the process's in `ps -o comm`.

    Threads that this thread starts inherit the name.
    """
    with contextlib.suppress(OSError):  # /proc may be read-only
        Path("/proc/thread-self/comm").write_text(name)
