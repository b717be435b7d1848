"""CPU use of other processes: work of all cores minus that of this process and its descendants."""

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from loadtest.measurement import other_processes
from loadtest.measurement.other_processes import ForeignWork


class Machine:
    """CPU seconds of a simulated machine, set by a test."""

    def __init__(self) -> None:
        self.busy = self.now = self.own = 0.0
        self.children: list[float | None] = []

    def process(self) -> Any:
        """Return a process as psutil does. A child of None has just ended."""

        def times(seconds: float | None) -> tuple[float, ...]:
            if seconds is None:
                raise psutil.NoSuchProcess(1)
            return (seconds, 0.0, 0.0, 0.0, 99.0)  # the fifth value is I/O wait

        children = [SimpleNamespace(cpu_times=lambda seconds=seconds: times(seconds)) for seconds in self.children]
        return SimpleNamespace(children=lambda recursive: children if recursive else [])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return the simulated machine that `ForeignWork` measures."""
    made = Machine()
    monkeypatch.setattr(other_processes, "busy_seconds", lambda: made.busy)
    monkeypatch.setattr(psutil, "Process", made.process)
    # Replaced in one module only, because other threads also use the clock.
    monkeypatch.setattr(other_processes, "time", SimpleNamespace(monotonic=lambda: made.now))
    monkeypatch.setattr(other_processes, "os", SimpleNamespace(times=lambda: (made.own, 0.0, 0.0, 0.0, made.now)))
    return made


def test_cores_kept_busy_by_other_processes(machine: Machine) -> None:
    machine.children = [10.0]
    foreign = ForeignWork()
    machine.now, machine.busy, machine.own, machine.children = 4.0, 8.0, 1.0, [13.0, 2.0, None]
    assert foreign.cores() == pytest.approx((8.0 - 1.0 - 3.0 - 2.0) / 4.0)


def test_busy_cores_are_never_negative(machine: Machine) -> None:
    foreign = ForeignWork()
    machine.now, machine.busy, machine.own = 1.0, 0.5, 0.6  # the two counts have different resolutions
    assert foreign.cores() == 0.0
