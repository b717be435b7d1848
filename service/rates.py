"""How fast the service has worked of late: what a prediction of waiting rests on."""

import math

# How far back the observed rates look. Long enough to average over a batch, short enough to follow the load.
_MEMORY_SECONDS = 30.0
# What is told before anything was observed.
_UNKNOWN_WAIT_SECONDS = 1.0
# Fewer events say little of a rate: the mean of 16 gaps is off by a quarter.
_FEW = 16


class Rate:
    """An exponentially weighted average of something per second of the time that is added. Other time does not
    dilute it."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0
        self._num_events = 0

    def add(self, amount: float, seconds: float) -> None:
        """Count `amount`, spread evenly over the `seconds` since the last call."""
        keep = math.exp(-seconds / _MEMORY_SECONDS)
        weighted_seconds = _MEMORY_SECONDS * (1.0 - keep)  # of this interval, as seen from its end
        weight = weighted_seconds / seconds if seconds > 0.0 else 1.0
        self._amount = self._amount * keep + amount * weight
        self._seconds = self._seconds * keep + weighted_seconds
        self._num_events += amount > 0.0

    @property
    def is_known(self) -> bool:
        """Whether enough was observed to refuse somebody for it."""
        return self._num_events >= _FEW and self._amount > 0.0 and self._seconds > 0.0

    def seconds_for(self, amount: float, *, prior: float = 0.0) -> float:
        """How long `amount` takes at the observed rate; a second when nothing was observed.

        prior: what is taken to have been observed beside it, in no time.
        """
        observed = self._amount + prior
        if observed <= 0.0 or self._seconds <= 0.0:
            return _UNKNOWN_WAIT_SECONDS
        return amount * self._seconds / observed
