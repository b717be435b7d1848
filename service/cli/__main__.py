"""Entry point of the `kvasir` program: installs the Ctrl-C handler, then imports the command line.

Ctrl-C still shows a traceback in the first 10 to 20 ms, while Python starts and before this module is imported.
"""

import importlib
import sys

from service.cli.interrupts import exit_on_interrupt


def main() -> int:
    """Run the command given by this process' arguments and return its exit code."""
    exit_on_interrupt()
    code: int = importlib.import_module("service.cli.main").main()
    exit_on_interrupt()  # also while the interpreter shuts down
    return code


if __name__ == "__main__":
    sys.exit(main())
