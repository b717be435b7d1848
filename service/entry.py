"""Entry point of the `kvasir` program: handles Ctrl-C first, then imports the command line.

Python's own start, 10 to 20 ms before this module is imported, still answers Ctrl-C with a traceback.
"""

import importlib
import sys

from service.interrupts import exit_on_interrupt


def main() -> int:
    """Run the command of this process's arguments and return its exit code."""
    exit_on_interrupt()
    code: int = importlib.import_module("service.cli").main()
    exit_on_interrupt()  # while the interpreter ends
    return code


if __name__ == "__main__":
    sys.exit(main())
