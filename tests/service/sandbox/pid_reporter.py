"""Child process that replies with its process id, and sends itself the signal of a command."""

import os
from collections.abc import Callable
from typing import Any

from service.sandbox.child_process import run_command_loop


def main() -> None:
    """Run the command loop of the child process."""
    run_command_loop(_prepare)


def _prepare(opening: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def handle(command: dict[str, Any]) -> dict[str, Any]:
        if "signal" in command:
            os.kill(os.getpid(), command["signal"])
        return {"pid": os.getpid(), "name": opening["name"]}

    handle(opening)
    return handle
