"""Child process that renders chat templates under limits of the operating system, see `model.chat.template_sandbox`.

The process starts with the first rendering, and again after a limit has killed it. It renders one conversation at a
time. `render` blocks, so call it from a thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from model.chat.template import MAX_CHARACTERS
from model.chat.template_sandbox import TemplateFailure
from service.sandbox.child_process import BoundedProcess, ProcessEnded, python_arguments


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of one rendering (CPU seconds, characters of text) and of the process (memory)."""

    cpu_seconds: float = 5.0
    memory_bytes: int = 512 * 2**20
    max_characters: int = MAX_CHARACTERS


class TemplateProcess:
    """Renderer of one chat template.

    Args:
        source: text of the Jinja template.
    """

    def __init__(self, source: str, limits: Limits | None = None) -> None:
        self._source = source
        self._limits = Limits() if limits is None else limits
        self._process = BoundedProcess(python_arguments("model.chat.template_sandbox"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check(self) -> None:
        """Start the process with the compiled template, if it is not running.

        Raises:
            TemplateFailure: the template is invalid, or exceeds a limit.
        """
        if not self._process.is_running:
            self._ask(
                {
                    "source": self._source,
                    "max_characters": self._limits.max_characters,
                    "memory_bytes": self._limits.memory_bytes,
                    "cpu_seconds": self._limits.cpu_seconds,
                }
            )

    def render(self, variables: Mapping[str, Any]) -> str:
        """Render the template and return its text.

        Raises:
            TemplateFailure: the template raised an error, failed, or exceeded a limit. The message is one line.
        """
        self.check()
        return self._ask(variables)

    def close(self) -> None:
        """End the process. The next rendering starts a new process."""
        self._process.close()

    def _ask(self, order: Mapping[str, Any]) -> str:
        process = self._process
        try:
            answer = process.ask(order) if process.is_running else process.start(order)
        except ProcessEnded:
            raise TemplateFailure(
                f"it took over {self._limits.cpu_seconds:g} s of processor time or "
                f"{self._limits.memory_bytes // 2**20} MiB of memory"
            ) from None
        if "error" in answer:
            if not answer["by_template"]:
                self.close()  # the failure may have left the process short of memory
            raise TemplateFailure(answer["error"], by_template=answer["by_template"])
        return str(answer["text"])
