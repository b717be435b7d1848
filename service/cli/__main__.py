"""Entry point of the `kvasir` program: Ctrl-C while a command is imported prints nothing, and the exit code is 130."""

import signal
import sys
from importlib import import_module
from os import _exit


def main() -> int:
    """Run the command given by this process' arguments and return its exit code."""
    exit_on_interrupt()  # in the milliseconds before, Ctrl-C shows a traceback of Python
    code: int = import_module("service.cli.main").main()
    exit_on_interrupt()  # also while the interpreter shuts down
    return code


def exit_on_interrupt() -> None:
    """Let SIGINT end the process with exit code 130, unless SIGINT is ignored, as in background jobs of a shell."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: _exit(128 + number))


if __name__ == "__main__":
    sys.exit(main())
