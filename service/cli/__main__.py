"""Entry point of the `kvasir` program. Ctrl-C during a command's imports exits with code 130, without a traceback."""

import gc
import signal
import sys
from importlib import import_module
from os import _exit
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.supervisor.worker_process import WorkerProcess


def main() -> int:
    """Run the command given by this process' arguments and return its exit code."""
    exit_on_interrupt()  # in the milliseconds before, Ctrl-C shows a traceback of Python
    gc.disable()  # until the command runs: imported modules are no garbage, and collection takes a tenth of their time
    code: int = import_module("service.cli.main").main(worker=start_worker())
    exit_on_interrupt()  # also while the interpreter shuts down
    return code


def start_worker() -> "WorkerProcess | None":
    """Start the worker of `kvasir serve`, which imports torch while this process imports and reads the flags.

    Return None for other commands and for help, and if no process can be started now.
    """
    if sys.argv[1:2] != ["serve"] or {"-h", "--help"} & set(sys.argv):
        return None
    import_module("service.config.torch_environment").set_torch_environment()
    try:
        worker: WorkerProcess = import_module("service.supervisor.worker_process").WorkerProcess.start()
    except OSError:  # the supervisor tries again, and then reports the error
        return None
    return worker


def exit_on_interrupt() -> None:
    """Make SIGINT end this process with exit code 130; an ignored SIGINT (a shell's background job) stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: _exit(128 + number))


if __name__ == "__main__":
    sys.exit(main())
