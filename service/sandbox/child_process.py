"""Child process that handles untrusted input, one command at a time, under operating-system resource limits.

Commands and replies are JSON lines. The child sets its own limits, and runs until its parent closes the pipe. After a
limit has ended the child, the caller starts a new one. Calls block, so make them in a separate thread.
"""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

# Timeout of a reply. The child's own limits are of CPU time, which a stopped child does not use.
ANSWER_SECONDS: Final = 60.0
_ROOT: Final = str(Path(__file__).parents[2])


class ProcessEnded(Exception):
    """The child ended before it replied, most likely at one of its limits."""


class ProcessKilled(ProcessEnded):
    """The child was killed by SIGKILL: by this process at the reply timeout, or from outside, but not by its limits."""


def python_arguments(module: str) -> list[str]:
    """Return the Python arguments that run a module's `main` from any working directory."""
    return ["-c", f"import sys; sys.path.append({_ROOT!r}); from {module} import main; main()"]


class BoundedProcess:
    """Python child process.

    Args:
        arguments: command-line arguments of Python.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = arguments
        self._process: subprocess.Popen[str] | None = None
        self._opening: Mapping[str, Any] = {}

    @property
    def is_running(self) -> bool:
        """True from the start of the child until it is closed or has ended without a reply."""
        return self._process is not None

    def start(self, opening: Mapping[str, Any]) -> dict[str, Any]:
        """Start the child, send the first command and return the reply.

        Raises:
            ProcessEnded: the child ended without a reply.
        """
        assert self._process is None
        self._opening = opening
        # -P: modules in the working directory or a script's directory must not shadow the child's imports.
        self._process = subprocess.Popen(
            [sys.executable, "-P", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        return self._answer(opening)

    def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Send a command and return the reply.

        If the child was killed, which its limits never do, a new child gets the command once more.

        Raises:
            ProcessEnded: the child ended without a reply, and is closed.
        """
        try:
            return self._answer(order)
        except ProcessKilled:
            self.start(self._opening)
            return self._answer(order)

    def _answer(self, order: Mapping[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        patience = threading.Timer(ANSWER_SECONDS, process.kill)
        patience.daemon = True
        patience.start()
        try:
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # the child ended before it had read the whole command
            line = ""
        finally:
            patience.cancel()
        if not line.endswith("\n"):
            was_closed = self._process is not process
            self.close()
            raise ProcessEnded if was_closed or process.wait() != -signal.SIGKILL else ProcessKilled
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Kill the child, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(OSError):  # closing flushes unsent data to a process that has ended
                    pipe.close()
