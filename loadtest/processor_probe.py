"""What the processors give just now: a product of matrices, timed for some hundredths of a second. Imports torch.

Two processors of a virtual machine may at times be two threads of one core of its host. Nothing tells the guest, and no
work of others is seen in it, yet all that computes takes up to twice as long. So a comparison looks before, between and
after what it compares, and takes anew what the machine changed under.
"""

import statistics
import time

import torch

from loadtest.roofline import products

_SIDE = 1024
_TRIES = 9


class ProcessorProbe:
    """Matrices of bfloat16, which fit into the caches, made once.

    Args:
        threads: that multiply, as many as the engines compared have.
    """

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._product = products("bfloat16", _SIDE, "cpu")[-1]  # by oneDNN, where it is

    @torch.inference_mode()
    def gflops(self) -> float:
        """GFLOP/s now: the median of a few products."""
        self._product()
        return 2e-9 * _SIDE**3 / statistics.median(self._seconds() for _ in range(_TRIES))

    def _seconds(self) -> float:
        began = time.perf_counter()
        self._product()
        return time.perf_counter() - began
