"""Child process that renders chat templates under limits of CPU time and memory."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

from model.chat.template_sandbox import MAX_CHARACTERS, TemplateFailure, compile_template, render
from service.sandbox.child_process import BoundedProcess, ProcessEnded, ProcessLimits, run_command_loop

TEMPLATE_LIMITS: Final = ProcessLimits(cpu_seconds=5.0, memory_bytes=512 * 2**20)


class TemplateProcess:
    """Client of a child process that renders one chat template to texts of at most `max_characters`."""

    def __init__(
        self, source: str, limits: ProcessLimits = TEMPLATE_LIMITS, *, max_characters: int = MAX_CHARACTERS
    ) -> None:
        self._limits = limits
        opening = {"source": source, "max_characters": max_characters}
        self._process = BoundedProcess(__name__, limits, lambda: opening)

    def render(self, variables: Mapping[str, Any] | None) -> str:
        """Return the text that the child process renders from the variables. With None, only compile the template.

        Raises:
            TemplateFailure: the template is invalid, raised an error, or exceeded a limit. The message is one line.
        """
        try:
            reply = self._process.ask({"variables": variables})
        except ProcessEnded:
            raise TemplateFailure(f"rendering the chat template took over {self._limits}") from None
        if "error" in reply:
            if not reply["by_template"]:
                self.close()  # the failure may have left the process short of memory
            raise TemplateFailure(reply["error"], by_template=reply["by_template"])
        return str(reply["text"])

    def close(self) -> None:
        self._process.close()


def main() -> None:
    """Run the child process: compile a chat template, and render one conversation per command."""
    run_command_loop(_prepare)


def _prepare(opening: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    compiled = functools.cache(lambda: compile_template(opening["source"]))

    def handle(command: dict[str, Any]) -> dict[str, Any]:
        try:
            template, text = compiled(), ""
            if command["variables"] is not None:
                text = render(template, command["variables"], max_characters=opening["max_characters"])
            return {"text": text}
        except TemplateFailure as failure:
            return {"error": str(failure), "by_template": failure.by_template}

    return handle
