"""Command loop of a child process that handles untrusted input, see `service.sandbox.child_process`."""

import json
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from model.system.parent_death import end_with_parent


def run_command_loop(prepare: Callable[[dict[str, Any]], Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """Reply to the parent's commands until the parent closes the pipe, or until a limit ends this process.

    Commands and replies are JSON lines. The first command holds `cpu_seconds` per later command and `memory_bytes`.
    RLIMIT_AS limits memory. A timer's signal ends the process even inside one long instruction.

    Args:
        prepare: gets the first command, which is not limited. Returns the function that handles the later commands.
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
