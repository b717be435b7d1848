"""Silence, and what is none."""

import pytest

from service.ipc.shared_state import Watchdog


class Bench:
    """A watchdog that looks ten times a second, at a sign that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sign: object = 0
        self.watchdog = Watchdog(lambda: self.sign, clock=lambda: self.now)

    def silence_after(self, seconds: float) -> float:
        """What it says then."""
        until, silence = self.now + seconds, 0.0
        while self.now < until - 0.05:
            self.now += 0.1
            silence = self.watchdog.silence()
        return round(silence, 3)


def test_silence_is_counted_since_the_last_sign() -> None:
    bench = Bench()
    bench.silence_after(1.0)
    assert bench.silence_after(9.0) == 9.9  # it was there at the first look
    for number in range(1, 10):
        bench.sign = number
        assert bench.silence_after(5.0) == 4.9


def test_any_change_is_a_sign() -> None:
    bench = Bench()
    for sign in ((5, 0), (0, 1), (0, 0), None, (5, 0)):
        bench.sign = sign
        assert bench.silence_after(0.1) == 0.0


def test_who_has_acted_begins_anew() -> None:
    bench = Bench()
    bench.silence_after(20.0)
    bench.watchdog.forgive()
    assert bench.silence_after(3.0) == 2.9


def test_time_in_which_nobody_looked_counts_as_little() -> None:
    bench = Bench()
    before = bench.silence_after(5.0)
    bench.now += 3600.0  # a paused container
    assert bench.watchdog.silence() == pytest.approx(before + 1.0)
