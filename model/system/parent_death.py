"""Processes that end when the process that started them ends, for any reason. Torch-free.

As a program, `python parent_death.py PARENT SIGNAL COMMAND…` binds itself to its parent and becomes the command.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

# Only Linux has prctl.
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process the signal when the thread that started it ends.

    The setting survives exec. Does nothing on systems without prctl.
    """
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def bind_command_to_parent(command: Sequence[str], number: signal.Signals) -> list[str]:
    """Return a command line that runs `command` and sends it the signal when the calling thread ends.

    An interpreter sets the signal and then execs the command. `preexec_fn` would run Python between fork and exec,
    which can deadlock in a process with threads (https://docs.python.org/3/library/subprocess.html).
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(number)), *command]


def main(argv: Sequence[str]) -> int:
    """Run a command bound to its parent. Exit codes: 1 if the parent has already ended, else the command's own."""
    parent, number, *command = argv
    end_with_parent(signal.Signals(int(number)))
    if os.getppid() != int(parent):  # the parent ended before the signal was set
        return 1
    os.execvp(command[0], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
