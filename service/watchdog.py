"""Tells when a worker hangs: it lives, and makes no progress."""

import time
from collections.abc import Callable

from service.lifecycle import Lifecycle

# Two looks that are further apart than this say that main itself stood still, as when a container is paused.
_MOST_BETWEEN_LOOKS = 1.0


class Watchdog:
    """Looks at the worker's beats. Whoever looks does so many times a second.

    Args:
        limit_seconds: silence that is too long; 0 for none that is.
        clock: seconds.
    """

    def __init__(
        self, lifecycle: Lifecycle, *, limit_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lifecycle = lifecycle
        self._limit_seconds = limit_seconds
        self._clock = clock
        self._last_look = clock()
        self._last_beat = -1
        self._silence = 0.0

    def barks(self) -> bool:
        """Whether the worker has been silent for too long. One that is not up yet owes no beats."""
        now, lifecycle = self._clock(), self._lifecycle
        elapsed, self._last_look = now - self._last_look, now
        beat = lifecycle.num_beats.value
        if beat != self._last_beat or lifecycle.ready_epoch.value != lifecycle.epoch.value:
            self._last_beat, self._silence = beat, 0.0
            return False
        self._silence += min(elapsed, _MOST_BETWEEN_LOOKS)
        if not 0.0 < self._limit_seconds < self._silence:
            return False
        self._silence = 0.0  # whoever was told acts
        return True
