"""Silence, and what is none."""

import os

import pytest

from service.lifecycle import Lifecycle
from service.watchdog import Watchdog


class Bench:
    """A watchdog of ten seconds' patience that looks ten times a second."""

    def __init__(self, limit_seconds: float = 10.0) -> None:
        self.now = 0.0
        self.lifecycle = Lifecycle(main_pid=os.getpid())
        self.lifecycle.ready_epoch.value = 0
        self.watchdog = Watchdog(self.lifecycle, limit_seconds=limit_seconds, clock=lambda: self.now)

    def barks(self, seconds: float) -> list[float]:
        """When it did, within that time."""
        began, heard = self.now, []
        while self.now < began + seconds:
            self.now += 0.1
            if self.watchdog.barks():
                heard.append(self.now - began)
        return heard


def test_a_worker_that_beats_is_well() -> None:
    bench = Bench()
    for _ in range(10):
        bench.lifecycle.beat()
        assert bench.barks(9.0) == []


def test_a_silent_worker_hangs_and_is_reported_once_each_time() -> None:
    assert Bench().barks(25.0) == pytest.approx([10.2, 20.3], abs=0.15)


def test_a_limit_of_zero_is_none() -> None:
    assert Bench(limit_seconds=0.0).barks(1000.0) == []


def test_a_worker_that_is_not_up_yet_owes_nothing() -> None:
    bench = Bench()
    bench.lifecycle.epoch.value = 1
    assert bench.barks(100.0) == []
    bench.lifecycle.ready_epoch.value = 1
    assert len(bench.barks(12.0)) == 1


def test_time_in_which_main_stood_still_too_does_not_count() -> None:
    bench = Bench()
    bench.barks(5.0)
    bench.now += 3600.0  # a paused container
    assert bench.barks(3.0) == []
    assert len(bench.barks(3.0)) == 1
