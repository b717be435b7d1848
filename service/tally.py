"""Observations of one histogram, gathered: what each alone would pay in a file that processes share is paid once."""

from bisect import bisect_left

from prometheus_client import Histogram

# So many are gathered, and no more.
_MOST = 1000


class Tally:
    """What a histogram will be told at the next `flush`, as if each had been observed; or sooner."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._gathered: list[tuple[float, int]] = []

    def add(self, value: float, count: int = 1) -> None:
        """Gather `count` observations of this value."""
        self._gathered.append((value, count))
        if len(self._gathered) >= _MOST:
            self.flush()

    def flush(self) -> None:
        """Observe what was gathered. prometheus_client has no way but one by one, so this is its `observe`, in sums."""
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
