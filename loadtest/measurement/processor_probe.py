"""Probe of the processors' current speed: a matrix product timed for some hundredths of a second. Imports torch.

Two processors of a virtual machine may at times be two threads of one core of its host. The guest cannot see this,
and computing then takes up to twice as long. A comparison therefore probes before, between and after its sides, and
repeats a pair during which the speed changed.
"""

import statistics
import time

import torch

from loadtest.measurement.roofline import products

_SIDE = 1024
_TRIES = 9


class ProcessorProbe:
    """Probe with bfloat16 matrices that fit into the caches, allocated once.

    Args:
        threads: threads of the product, as many as the compared engines use.
    """

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._product = products("bfloat16", _SIDE, "cpu")[-1]  # by oneDNN, if available

    @torch.inference_mode()
    def gflops(self) -> float:
        """Return the current GFLOP/s: the median of a few products."""
        self._product()
        return 2e-9 * _SIDE**3 / statistics.median(self._seconds() for _ in range(_TRIES))

    def _seconds(self) -> float:
        began = time.perf_counter()
        self._product()
        return time.perf_counter() - began
