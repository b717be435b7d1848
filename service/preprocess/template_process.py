"""Child process that renders chat templates under limits of the operating system.

The process starts with the first rendering, and again after a limit has ended the process. One conversation is rendered
at a time. `render` blocks, so call it from a thread.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from model.chat.template_sandbox import MAX_CHARACTERS, TemplateFailure, compile_template, render
from service.sandbox.child_process import BoundedProcess, ProcessEnded, python_arguments
from service.sandbox.command_loop import run_command_loop


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateLimits:
    """Limits of one rendering (CPU seconds, characters of text) and of the process (memory)."""

    cpu_seconds: float = 5.0
    memory_bytes: int = 512 * 2**20
    max_characters: int = MAX_CHARACTERS


class TemplateProcess:
    """Renderer of one chat template.

    Args:
        source: text of the Jinja template.
    """

    def __init__(self, source: str, limits: TemplateLimits | None = None) -> None:
        self._source = source
        self._limits = TemplateLimits() if limits is None else limits
        self._process = BoundedProcess(python_arguments(__name__))

    def render(self, variables: Mapping[str, Any] | None) -> str:
        """Render the template and return the text. With None, only compile the template.

        Raises:
            TemplateFailure: the template is invalid, raised an error, failed, or exceeded a limit. One line.
        """
        try:
            if not self._process.is_running:
                self._process.start({"source": self._source, **asdict(self._limits)})
            reply = self._process.ask({"variables": variables})
        except ProcessEnded:
            raise TemplateFailure(
                f"rendering took over {self._limits.cpu_seconds:g} s of processor time or "
                f"{self._limits.memory_bytes // 2**20} MiB of memory"
            ) from None
        if "error" in reply:
            if not reply["by_template"]:
                self.close()  # the failure may have left the process short of memory
            raise TemplateFailure(reply["error"], by_template=reply["by_template"])
        return str(reply["text"])

    def close(self) -> None:
        """End the process. The next rendering starts a new process."""
        self._process.close()


def main() -> None:
    """Compile and render for the parent process."""
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
