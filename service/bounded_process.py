"""A child process that works for strangers, one order at a time, and bounds itself by the operating system.

Orders and answers are JSON lines. It lives as long as its parent keeps the pipe open; where a limit has ended it,
whoever asks next starts another. Asking blocks: whoever asks does so in a thread of its own.
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

# For an answer. The child's own bounds are of processor time, which end no child that is stopped.
ANSWER_SECONDS: Final = 60.0
_ROOT: Final = str(Path(__file__).parents[1])


class ProcessEnded(Exception):
    """The child ended before it answered: a limit ended it, most likely."""


class ProcessKilled(ProcessEnded):
    """It was killed, which none of its own limits does; by us where it took too long."""


def program_of(module: str) -> list[str]:
    """What Python is started with to run a module's `main`, wherever it was started from."""
    return ["-c", f"import sys; sys.path.append({_ROOT!r}); from {module} import main; main()"]


class BoundedProcess:
    """A Python child.

    Args:
        arguments: what Python is started with.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = arguments
        self._process: subprocess.Popen[str] | None = None
        self._opening: Mapping[str, Any] = {}

    @property
    def is_running(self) -> bool:
        """Whether it has been started, and not been closed or lost since."""
        return self._process is not None

    def start(self, opening: Mapping[str, Any]) -> dict[str, Any]:
        """Start it and give it its first order. Returns the answer.

        Raises:
            ProcessEnded: there was none.
        """
        assert self._process is None
        self._opening = opening
        # -P: a script's own directory must not lend its modules' names to what it imports.
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
        """Give it an order; to another in its place where it was killed, which is not the order's fault.

        Returns the answer.

        Raises:
            ProcessEnded: there was none; the child is closed.
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
        except OSError:  # it ended before it had read everything
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
        """End it, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(OSError):  # what was not sent to a process that is gone
                    pipe.close()
