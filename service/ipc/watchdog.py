"""Watchdog timer: measures how long a process has sent no heartbeat."""

import time
from collections.abc import Callable

# A longer gap between two checks means that the checking process itself was paused, as with a paused container.
_MOST_BETWEEN_LOOKS = 1.0


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
        """Return the seconds since the last heartbeat. A gap between two calls counts as at most 1 s."""
        now, sign = self._clock(), self._sign()
        elapsed, self._last_look = now - self._last_look, now
        self._silence += min(elapsed, _MOST_BETWEEN_LOOKS)
        if sign != self._last_sign:
            self.forgive(sign)
        return self._silence

    def forgive(self, sign: object = None) -> None:
        """Reset the silence to 0, after the caller has acted upon it."""
        self._last_sign, self._silence = sign, 0.0
