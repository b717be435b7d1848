"""How much of the machine others take while something of ours is measured. Torch-free.

Others' work is what all cores did, less what this process and all below it did. Engines whose threads wait for each
other lose far more to a neighbour than the neighbour takes, so a figure with much of it beside is worth little.
"""

import os
import time

import psutil

from loadtest.provenance import busy_seconds


class ForeignWork:
    """Counts from the moment it is made."""

    def __init__(self) -> None:
        self._began = self._now()

    def cores(self) -> float:
        """Cores that others kept busy since then, on average; never less than 0."""
        seconds, busy, own = (now - began for now, began in zip(self._now(), self._began, strict=True))
        return max(0.0, (busy - own) / seconds)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """The time, and CPU seconds of all cores, and of ours: those that ended are in their parents' counts."""
        own = psutil.Process()
        counts = [os.times()[:4]]
        for process in own.children(recursive=True):
            try:
                counts.append(process.cpu_times()[:4])
            except psutil.NoSuchProcess:
                continue
        return time.monotonic(), busy_seconds(), sum(map(sum, counts))
