"""Marginal cost of one more row in a step, measured while serving."""

# Prior of the fixed time of a step, as a number of rows that would take as long.
_USUAL_ROWS = 16
# Weight of the prior against the observed spread of row counts, in steps times rows squared.
_DOUBT = 64
# Decay of the sums at each step: about the last 1,000 steps count.
_MEMORY = 0.999
# Cap on an observed duration, as a multiple of the mean: longer steps are stalls of the machine.
_OUTLIER = 3.0
_LEAST, _MOST = 0.05, 1.0


class StepCost:
    """Linear model of a step's duration over its rows, fitted to recent steps by least squares.

    If all recent steps have the same number of rows, the slope is undetermined. The slope of the prior then dominates.
    """

    def __init__(self) -> None:
        self._num_steps = 0.0  # sum of weights, with the same decay as the other sums
        self._rows = 0.0
        self._seconds = 0.0
        self._rows_squared = 0.0
        self._rows_seconds = 0.0

    def observe(self, num_rows: int, seconds: float) -> None:
        """Record the duration of a step of `num_rows` rows without prefills."""
        if self._seconds:
            seconds = min(seconds, _OUTLIER * self._seconds / self._num_steps)
        self._num_steps = self._num_steps * _MEMORY + 1
        self._rows = self._rows * _MEMORY + num_rows
        self._seconds = self._seconds * _MEMORY + seconds
        self._rows_squared = self._rows_squared * _MEMORY + num_rows**2
        self._rows_seconds = self._rows_seconds * _MEMORY + num_rows * seconds

    def of_one_more(self, num_rows: int) -> float:
        """Return the marginal cost of a row in a step of `num_rows` rows, relative to the average cost of its rows.

        One more row raises throughput if its expected tokens exceed this share. The share approaches 0 if the duration
        hardly depends on the number of rows, and 1 if it is proportional to the number of rows.
        """
        if not self._seconds:
            return num_rows / (num_rows + _USUAL_ROWS)
        mean_rows, mean_seconds = self._rows / self._num_steps, self._seconds / self._num_steps
        spread = self._rows_squared - self._rows * mean_rows
        usual = mean_seconds / (mean_rows + _USUAL_ROWS)
        slope = (self._rows_seconds - self._rows * mean_seconds + _DOUBT * usual) / (spread + _DOUBT)
        whole = mean_seconds + slope * (num_rows - mean_rows)
        return min(_MOST, max(_LEAST, slope * num_rows / whole)) if whole > 0 else _MOST
