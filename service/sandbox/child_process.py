"""Child process that handles untrusted input, one command at a time, under resource limits of the operating system.

Commands and replies are JSON lines. The child sets its own limits, and runs until the parent closes the pipe.
"""

import json
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from model.system.c_library import end_with_parent

# Timeout of a reply. The child's own limits are of CPU time, which a stopped child does not use.
ANSWER_SECONDS: Final = 60.0
_ROOT: Final = str(Path(__file__).parents[2])


class ProcessEnded(Exception):
    """Error if the child process ended before it replied to a command, most likely at a resource limit."""


class ProcessKilled(ProcessEnded):
    """Error if SIGKILL ended the child process: at the reply timeout or from outside, not by its resource limits."""


class ProcessNotStarted(ProcessEnded):
    """Error if the child process ended before it was ready for commands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessLimits:
    """Resource limits of a child process: CPU seconds per command, and bytes of address space."""

    cpu_seconds: float
    memory_bytes: int

    def __str__(self) -> str:
        return f"{self.cpu_seconds:g} s of CPU time or {self.memory_bytes // 2**20} MiB of memory"


class BoundedProcess:
    """Python child process for untrusted input. A command starts the process if it is not running.

    Args:
        module: module whose `main` calls `run_command_loop`.
        opening: returns the first command that a new process gets.
    """

    def __init__(self, module: str, limits: ProcessLimits, opening: Callable[[], Mapping[str, Any]]) -> None:
        # The path is appended, so that the child imports from any working directory.
        self._program = f"import sys; sys.path.append({_ROOT!r}); from {module} import main; main()"
        self._limits, self._opening = limits, opening
        self._process: subprocess.Popen[str] | None = None

    def ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Send a command to the child and return the reply. Blocks, so call it from a thread.

        If SIGKILL ends the child (reply timeout, or from outside), a new child gets the command once more.

        Raises:
            ProcessNotStarted: a new child ended before it was ready.
            ProcessEnded: the child ended without a reply. The next command starts a new child.
        """
        try:
            return self._ask_once(command)
        except ProcessKilled:
            return self._ask_once(command)

    def _ask_once(self, command: Mapping[str, Any]) -> dict[str, Any]:
        if self._process is None:
            # -P: modules in the working directory or a script's directory must not shadow the child's imports.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", self._program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
            )
            try:
                self._exchange(self._process, {**self._opening(), **asdict(self._limits)})
            except ProcessEnded:
                raise ProcessNotStarted from None
        return self._exchange(self._process, command)

    def _exchange(self, process: subprocess.Popen[str], command: Mapping[str, Any]) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        timeout = threading.Timer(ANSWER_SECONDS, process.kill)
        timeout.daemon = True
        timeout.start()
        try:
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # the child ended before it had read the whole command
            line = ""
        finally:
            timeout.cancel()
        if not line.endswith("\n"):
            was_closed = self._process is not process
            self.close()
            raise ProcessEnded if was_closed or process.wait() != -signal.SIGKILL else ProcessKilled
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        """Kill the child, if there is one. The next command starts a new child."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(OSError):  # closing flushes unsent data to a process that has ended
                    pipe.close()


def run_command_loop(prepare: Callable[[dict[str, Any]], Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """Run in the child process: reply to the commands of `BoundedProcess` until the parent closes the pipe.

    Args:
        prepare: handles the first command, without limits. Returns the function that handles the later commands.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent handles these signals and then closes the pipe
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    opening = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    handle = prepare(opening)
    resource.setrlimit(resource.RLIMIT_AS, (opening["memory_bytes"],) * 2)
    reply: dict[str, Any] = {}
    while True:
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()
        if not (line := sys.stdin.readline()):
            return
        signal.setitimer(signal.ITIMER_PROF, opening["cpu_seconds"])
        reply = handle(json.loads(line))
