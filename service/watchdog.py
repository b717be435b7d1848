"""Tells when a process hangs: it lives, and gives no sign of life."""

import time
from collections.abc import Callable

# Two looks that are further apart than this say that main itself stood still, as when a container is paused.
_MOST_BETWEEN_LOOKS = 1.0


class Watchdog:
    """Looks at a process' signs of life. Whoever looks does so many times a second.

    Args:
        sign: is another after each sign of life.
        clock: seconds.
    """

    def __init__(self, sign: Callable[[], object], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._sign = sign
        self._clock = clock
        self._last_look = clock()
        self._last_sign: object = None
        self._silence = 0.0

    def silence(self) -> float:
        """Seconds without a sign. Time in which nobody looked counts as little of it."""
        now, sign = self._clock(), self._sign()
        elapsed, self._last_look = now - self._last_look, now
        self._silence += min(elapsed, _MOST_BETWEEN_LOOKS)
        if sign != self._last_sign:
            self.forgive(sign)
        return self._silence

    def forgive(self, sign: object = None) -> None:
        """Begin anew; for whoever has acted upon the silence."""
        self._last_sign, self._silence = sign, 0.0
