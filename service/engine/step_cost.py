"""What one row more costs a step, measured while it is served."""

# A step takes as long as if it had so many rows more than it has, until it is known better.
_USUAL_ROWS = 16
# Weight of that belief against the spread of rows seen, in steps times rows squared.
_DOUBT = 64
# How much of what is known of earlier steps stays at each one: about the last thousand count.
_MEMORY = 0.999
# A step that took so many times as long as others says something of the machine, not of its rows.
_OUTLIER = 3.0
_LEAST, _MOST = 0.05, 1.0


class StepCost:
    """The seconds of a step are a straight line over its rows, fitted to the last steps by least squares.

    Where all of them had as many rows, nothing says how steep it is: a usual line then counts more than they do.
    """

    def __init__(self) -> None:
        self._num_steps = 0.0  # weights, as all the sums
        self._rows = 0.0
        self._seconds = 0.0
        self._rows_squared = 0.0
        self._rows_seconds = 0.0

    def observe(self, num_rows: int, seconds: float) -> None:
        """A step of so many rows, each a sequence's next token, took so long."""
        if self._seconds:
            seconds = min(seconds, _OUTLIER * self._seconds / self._num_steps)
        self._num_steps = self._num_steps * _MEMORY + 1
        self._rows = self._rows * _MEMORY + num_rows
        self._seconds = self._seconds * _MEMORY + seconds
        self._rows_squared = self._rows_squared * _MEMORY + num_rows**2
        self._rows_seconds = self._rows_seconds * _MEMORY + num_rows * seconds

    def of_one_more(self, num_rows: int) -> float:
        """Seconds that one row adds to a step of `num_rows`, as a share of what a row of it takes on average.

        A row more pays for itself if it is worth more than this share of a row that is there: only then it makes the
        tokens of a second more. Near 0 where a step takes as long however many rows it has, near 1 where rows are all
        that takes time.
        """
        if not self._seconds:
            return num_rows / (num_rows + _USUAL_ROWS)
        mean_rows, mean_seconds = self._rows / self._num_steps, self._seconds / self._num_steps
        spread = self._rows_squared - self._rows * mean_rows
        usual = mean_seconds / (mean_rows + _USUAL_ROWS)
        slope = (self._rows_seconds - self._rows * mean_seconds + _DOUBT * usual) / (spread + _DOUBT)
        whole = mean_seconds + slope * (num_rows - mean_rows)
        return min(_MOST, max(_LEAST, slope * num_rows / whole)) if whole > 0 else _MOST
