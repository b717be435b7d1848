"""Ctrl-C handling before a command runs: the process exits at once with code 130 and prints nothing.

Imports take up to seconds, and a KeyboardInterrupt during an import shows a traceback. This module itself imports only
modules that load fast.
"""

import os
import signal
from types import FrameType

EXIT_CODE = 128 + signal.SIGINT  # the exit code that shells report for a process killed by SIGINT


def exit_on_interrupt() -> None:
    """Make SIGINT exit the process silently, unless SIGINT is ignored, as in background jobs of a shell."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    """Undo `exit_on_interrupt`: from now on SIGINT raises KeyboardInterrupt, so that a command can clean up."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(signal_number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_CODE)
