"""Moving averages of rates (tokens, endings), from which waiting times are predicted."""

import math

# Time constant of the averages: long enough to average over a batch, short enough to follow the load.
_MEMORY_SECONDS = 30.0
# Prediction before anything was observed.
_UNKNOWN_WAIT_SECONDS = 1.0
# Events that make a rate known. The mean of 16 exponential gaps has a relative standard error of a quarter.
_FEW = 16


class Rate:
    """Exponentially weighted average of an amount per second.

    Only time passed to `add` counts, so idle time does not lower the rate.
    """

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0
        self._num_events = 0

    def add(self, amount: float, seconds: float) -> None:
        """Add `amount`, spread evenly over the last `seconds`."""
        keep = math.exp(-seconds / _MEMORY_SECONDS)
        weighted_seconds = _MEMORY_SECONDS * (1.0 - keep)  # of this interval, as seen from its end
        weight = weighted_seconds / seconds if seconds > 0.0 else 1.0
        self._amount = self._amount * keep + amount * weight
        self._seconds = self._seconds * keep + weighted_seconds
        self._num_events += amount > 0.0

    @property
    def is_known(self) -> bool:
        """Report whether enough was observed to reject a request on the prediction."""
        return self._num_events >= _FEW and self._amount > 0.0 and self._seconds > 0.0

    def seconds_for(self, amount: float, *, prior: float = 0.0) -> float:
        """Return the seconds that `amount` takes at the observed rate; 1 s if nothing was observed.

        Args:
            prior: amount added to the observed amount, without time, for smoothing.
        """
        observed = self._amount + prior
        if observed <= 0.0 or self._seconds <= 0.0:
            return _UNKNOWN_WAIT_SECONDS
        return amount * self._seconds / observed
