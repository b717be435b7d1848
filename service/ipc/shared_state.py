"""State shared by all processes of the service, in shared memory created before the processes start.

Each word has one writer. No word needs a lock that a killed process could leave locked.
"""

import contextlib
import os
import time
from ctypes import c_double, c_int, c_long
from dataclasses import dataclass, field
from enum import IntEnum
from multiprocessing.sharedctypes import RawValue
from pathlib import Path

from model.system.parent_death import end_with_parent


class Phase(IntEnum):
    """Phase of the service. Phases only go forward."""

    STARTING = 0
    SERVING = 1
    DRAINING = 2  # running requests finish, new requests are rejected
    STOPPING = 3  # everything ends now; child processes obey SIGTERM only in this phase


@dataclass(frozen=True, kw_only=True, slots=True)
class Lifecycle:
    """Words shared by main, the API process (by fork) and the workers (as a process argument).

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
    """

    main_pid: int
    phase: c_int = field(default_factory=lambda: RawValue(c_int, Phase.STARTING))
    phase_seconds: c_double = field(default_factory=lambda: RawValue(c_double, 0.0))
    epoch: c_int = field(default_factory=lambda: RawValue(c_int, 0))
    num_killed: c_int = field(default_factory=lambda: RawValue(c_int, 0))
    num_exited: c_int = field(default_factory=lambda: RawValue(c_int, 0))
    epoch_seconds: c_double = field(default_factory=lambda: RawValue(c_double, 0.0))
    ready_epoch: c_int = field(default_factory=lambda: RawValue(c_int, -1))
    num_heartbeats: c_long = field(default_factory=lambda: RawValue(c_long, 0))
    num_api_beats: c_long = field(default_factory=lambda: RawValue(c_long, 0))
    num_active: c_int = field(default_factory=lambda: RawValue(c_int, 0))
    num_blocks: c_int = field(default_factory=lambda: RawValue(c_int, 0))
    has_standby_memory: c_int = field(default_factory=lambda: RawValue(c_int, 1))

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


def name_process(name: str) -> None:
    """Set the name of this process in `ps -o comm` and `top`: at most 15 characters."""
    with contextlib.suppress(OSError):  # /proc may be read-only
        Path("/proc/self/comm").write_text(name)
