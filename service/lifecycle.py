"""What every process of the service must know of the others, in shared memory made before they are started.

Each word has one writer, so none needs a lock, and none can be left locked by a process that is killed.
"""

import contextlib
import os
import signal
import time
from ctypes import c_double, c_int, c_long
from dataclasses import dataclass, field
from enum import IntEnum
from multiprocessing.sharedctypes import RawValue
from pathlib import Path

from model.parent_death import end_with_parent


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
    ready_epoch: the epoch of the last worker that was ready to serve, -1 before; written by the worker.
    num_beats: signs of life, at every step and while idle every second; written by the worker.
    num_api_beats: signs of life of the API process, every second; written by it.
    num_active: completion requests whose response is not finished; written by the API process.
    manager_pid: LitServe's queue process, 0 until it is up; written by main.
    num_blocks: of the KV-cache, 0 before it is known; written by the first worker, and taken by the next ones.
    has_standby_memory: 0 if a standby worker does not fit into memory; written by the first worker.
    """

    main_pid: int
    phase: c_int = field(default_factory=lambda: RawValue(c_int, Phase.STARTING))
    phase_seconds: c_double = field(default_factory=lambda: RawValue(c_double, 0.0))
    epoch: c_int = field(default_factory=lambda: RawValue(c_int, 0))
    epoch_seconds: c_double = field(default_factory=lambda: RawValue(c_double, 0.0))
    ready_epoch: c_int = field(default_factory=lambda: RawValue(c_int, -1))
    num_beats: c_long = field(default_factory=lambda: RawValue(c_long, 0))
    num_api_beats: c_long = field(default_factory=lambda: RawValue(c_long, 0))
    num_active: c_int = field(default_factory=lambda: RawValue(c_int, 0))
    manager_pid: c_int = field(default_factory=lambda: RawValue(c_int, 0))
    num_blocks: c_int = field(default_factory=lambda: RawValue(c_int, 0))
    has_standby_memory: c_int = field(default_factory=lambda: RawValue(c_int, 1))

    def enter(self, phase: Phase) -> None:
        """Begin a phase; main only."""
        self.phase_seconds.value = time.monotonic()
        self.phase.value = phase

    def beat(self) -> None:
        """Give a sign of life; the worker only."""
        self.num_beats.value += 1

    @property
    def worker_signs(self) -> tuple[int, int, int]:
        """The worker's signs of life, for a `Watchdog`: beats, and starts of another worker."""
        return self.num_beats.value, self.ready_epoch.value, self.epoch.value

    def beat_api(self) -> None:
        """Give a sign of life; the API process only."""
        self.num_api_beats.value += 1

    def die_with_main(self) -> None:
        """Have the kernel kill this child of main when main ends, and end it now if that has happened.

        To the kernel a parent is a thread: the one of main that started this child must live as long as main does.
        """
        end_with_parent()
        self.end_if_orphaned()

    def end_if_orphaned(self) -> None:
        """End this child of main if main is gone, and the queue process with it, which never looks."""
        if os.getppid() == self.main_pid:
            return
        if self.manager_pid.value:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.manager_pid.value, signal.SIGKILL)
        os._exit(1)


def name_process(name: str) -> None:
    """What `ps -o comm` and `top` call this process: at most 15 characters."""
    with contextlib.suppress(OSError):  # /proc may be read-only
        Path("/proc/self/comm").write_text(name)
