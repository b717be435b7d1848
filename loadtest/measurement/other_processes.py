"""CPU use of other processes during a measurement: work of all cores minus that of this process and its descendants.

Engine threads wait for each other, so an engine loses far more time to another process than that process takes.
"""

import os
import time

import psutil

from loadtest.measurement.provenance import busy_seconds


class ForeignWork:
    """Meter that counts from its creation."""

    def __init__(self) -> None:
        self._began = self._now()

    def cores(self) -> float:
        """Return the cores that other processes kept busy since then, on average; never below 0."""
        seconds, busy, own = (now - began for now, began in zip(self._now(), self._began, strict=True))
        return max(0.0, (busy - own) / seconds)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Return the time, CPU seconds of all cores, and CPU seconds of this process tree (ended children included)."""
        own = psutil.Process()
        counts = [os.times()[:4]]
        for process in own.children(recursive=True):
            try:
                counts.append(process.cpu_times()[:4])
            except psutil.NoSuchProcess:
                continue
        return time.monotonic(), busy_seconds(), sum(map(sum, counts))
