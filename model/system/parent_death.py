"""Processes that end when the process that started them ends, for any reason. Torch-free."""

import ctypes
import signal

# Only Linux has prctl.
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started this process ends; nothing without prctl."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
