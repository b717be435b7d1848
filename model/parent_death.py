"""A process that ends with the one that has started it, however that one ends. Torch-free."""

import ctypes
import signal

# Looked up here: between fork and exec nothing may be loaded. Linux alone has it.
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """From now on the kernel sends this process that signal when the thread that has started it ends; also in the
    middle of work, and across exec. Nothing where a system cannot."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, number, 0, 0, 0)
