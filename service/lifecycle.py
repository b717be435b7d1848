"""What every process of the service must know of the others, in shared memory made before they are started.

Each word has one writer, so none needs a lock, and none can be left locked by a process that is killed.
"""

import contextlib
import os
import signal
import time
from ctypes import c_double, c_int
from dataclasses import dataclass, field
from enum import IntEnum
from multiprocessing.sharedctypes import RawValue


class Phase(IntEnum):
    """The life of the service. It only goes forward."""

    STARTING = 0
    SERVING = 1
    DRAINING = 2  # running requests finish, new ones are refused
    STOPPING = 3  # everything ends now; only from here on do child processes obey SIGTERM


@dataclass(frozen=True, kw_only=True, slots=True)
class Lifecycle:
    """Shared between main, the API process (by fork) and the workers (as an argument of their process).

    phase: a `Phase`; written by main.
    phase_seconds: `time.monotonic()` at which the phase began; written by main.
    epoch: how many times a worker was started again; written by main.
    epoch_seconds: `time.monotonic()` of the last start of a worker; written by main.
    beat_seconds: `time.monotonic()` of the last sign of progress of a worker that has work, 0 while it has none;
        written by the worker, and reset by main between two workers.
    num_active: completion requests whose response is not finished; written by the API process.
    manager_pid: LitServe's queue process, 0 until it is up; written by main.
    """

    main_pid: int
    phase: c_int = field(default_factory=lambda: RawValue(c_int, Phase.STARTING))
    phase_seconds: c_double = field(default_factory=lambda: RawValue(c_double, 0.0))
    epoch: c_int = field(default_factory=lambda: RawValue(c_int, 0))
    epoch_seconds: c_double = field(default_factory=lambda: RawValue(c_double, 0.0))
    beat_seconds: c_double = field(default_factory=lambda: RawValue(c_double, 0.0))
    num_active: c_int = field(default_factory=lambda: RawValue(c_int, 0))
    manager_pid: c_int = field(default_factory=lambda: RawValue(c_int, 0))

    def enter(self, phase: Phase) -> None:
        """Begin a phase; main only."""
        self.phase_seconds.value = time.monotonic()
        self.phase.value = phase

    def beat(self, *, is_busy: bool) -> None:
        """Make a sign of progress, or say that there is no work; the worker only."""
        self.beat_seconds.value = time.monotonic() if is_busy else 0.0

    def end_if_orphaned(self) -> None:
        """End this child of main if main is gone, and the queue process with it, which never looks."""
        if os.getppid() == self.main_pid:
            return
        if self.manager_pid.value:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.manager_pid.value, signal.SIGKILL)
        os._exit(1)
