"""Ctrl-C before a command runs: the process ends at once with exit code 130, and prints nothing.

Imports take up to seconds, and a KeyboardInterrupt in one of them shows a traceback. Imports nothing that takes time.
"""

import os
import signal
from types import FrameType

EXIT_CODE = 128 + signal.SIGINT  # as shells report a process that SIGINT has ended


def exit_on_interrupt() -> None:
    """Let SIGINT end the process without a word, unless it is ignored, as in a shell's background jobs."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    """Undo `exit_on_interrupt`: from now on SIGINT raises KeyboardInterrupt, so that a command can clean up."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(signal_number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_CODE)
