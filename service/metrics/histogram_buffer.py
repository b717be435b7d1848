"""Buffer of histogram observations, written to prometheus_client's histogram at once."""

from bisect import bisect_left

from prometheus_client import Histogram

# Buffered values at which the buffer is flushed.
_MOST = 1000


class Tally:
    """Buffer of one histogram's observations. It is flushed by `flush`, or when full."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._gathered: list[tuple[float, int]] = []

    def add(self, value: float, count: int = 1) -> None:
        """Buffer `count` observations of a value."""
        self._gathered.append((value, count))
        if len(self._gathered) >= _MOST:
            self.flush()

    def flush(self) -> None:
        """Write the buffered observations to the histogram.

        prometheus_client can only observe value by value, so this repeats its `observe` with sums.
        """
        if not self._gathered:
            return
        bounds, total, counts = self._histogram._upper_bounds, 0.0, dict[int, int]()
        for value, count in self._gathered:
            bucket = bisect_left(bounds, value)
            counts[bucket] = counts.get(bucket, 0) + count
            total += value * count
        self._gathered.clear()
        self._histogram._sum.inc(total)
        for bucket, count in counts.items():
            self._histogram._buckets[bucket].inc(count)
