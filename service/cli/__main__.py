"""Entry point of the `kvasir` program. Ctrl-C during a command's imports exits with code 130, without a traceback."""

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
    """Make SIGINT end this process with exit code 130; an ignored SIGINT (a shell's background job) stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: _exit(128 + number))


if __name__ == "__main__":
    sys.exit(main())
