"""What others do is what all do, less what is ours, children that have ended included."""

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from loadtest.measurement import other_processes
from loadtest.measurement.other_processes import ForeignWork


class Machine:
    """Counts of CPU seconds that a test moves on."""

    def __init__(self) -> None:
        self.busy = self.now = self.own = 0.0
        self.children: list[float | None] = []

    def process(self) -> Any:
        """As psutil tells of ours; None is a child that has just ended."""

        def times(seconds: float | None) -> tuple[float, ...]:
            if seconds is None:
                raise psutil.NoSuchProcess(1)
            return (seconds, 0.0, 0.0, 0.0, 99.0)  # the fifth is time spent waiting for a disk

        children = [SimpleNamespace(cpu_times=lambda seconds=seconds: times(seconds)) for seconds in self.children]
        return SimpleNamespace(children=lambda recursive: children if recursive else [])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The machine that `ForeignWork` sees."""
    made = Machine()
    monkeypatch.setattr(other_processes, "busy_seconds", lambda: made.busy)
    monkeypatch.setattr(psutil, "Process", made.process)
    # Its own view of these modules: other threads look at the clock, too.
    monkeypatch.setattr(other_processes, "time", SimpleNamespace(monotonic=lambda: made.now))
    monkeypatch.setattr(other_processes, "os", SimpleNamespace(times=lambda: (made.own, 0.0, 0.0, 0.0, made.now)))
    return made


def test_what_others_did(machine: Machine) -> None:
    machine.children = [10.0]
    foreign = ForeignWork()
    machine.now, machine.busy, machine.own, machine.children = 4.0, 8.0, 1.0, [13.0, 2.0, None]
    assert foreign.cores() == pytest.approx((8.0 - 1.0 - 3.0 - 2.0) / 4.0)


def test_it_is_never_less_than_nothing(machine: Machine) -> None:
    foreign = ForeignWork()
    machine.now, machine.busy, machine.own = 1.0, 0.5, 0.6  # counted in different ticks
    assert foreign.cores() == 0.0
