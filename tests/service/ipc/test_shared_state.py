"""Watchdog that measures the time since the last heartbeat of a process."""

import pytest

from service.ipc.shared_state import Watchdog


class Bench:
    """Watchdog that checks ten times a second, with a heartbeat value that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sign: object = 0
        self.watchdog = Watchdog(lambda: self.sign, clock=lambda: self.now)

    def silence_after(self, seconds: float) -> float:
        """Return the silence in seconds after the given time."""
        until, silence = self.now + seconds, 0.0
        while self.now < until - 0.05:
            self.now += 0.1
            silence = self.watchdog.silence()
        return round(silence, 3)


def test_silence_begins_at_the_last_heartbeat() -> None:
    bench = Bench()
    bench.silence_after(1.0)
    assert bench.silence_after(9.0) == 9.9  # the first check counts as a heartbeat
    for number in range(1, 10):
        bench.sign = number
        assert bench.silence_after(5.0) == 4.9


def test_any_change_of_the_value_is_a_heartbeat() -> None:
    bench = Bench()
    for sign in ((5, 0), (0, 1), (0, 0), None, (5, 0)):
        bench.sign = sign
        assert bench.silence_after(0.1) == 0.0


def test_forgive_resets_the_silence() -> None:
    bench = Bench()
    bench.silence_after(20.0)
    bench.watchdog.forgive()
    assert bench.silence_after(3.0) == 2.9


def test_a_gap_between_two_checks_counts_as_one_second() -> None:
    bench = Bench()
    before = bench.silence_after(5.0)
    bench.now += 3600.0  # a paused container
    assert bench.watchdog.silence() == pytest.approx(before + 1.0)
