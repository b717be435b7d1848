"""Interface of tool formats, and the parts of a completion that parsers return. Torch-free."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from model.structured_output.lark_document import LarkDocument


class PartKind(StrEnum):
    """Kind of a part of a completion."""

    __hash__ = str.__hash__  # without this line, the hash is computed in Python, once per token

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"  # begins the next tool call; the part's text is the tool's name
    ARGUMENTS = "arguments"  # piece of the JSON text of the last call's arguments


class Part(NamedTuple):
    """Part of a completion: text, reasoning, the beginning of a tool call, or a piece of its arguments."""

    kind: PartKind
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolSchema:
    """Tool that a model may call, as grammars and parsers need it.

    parameters: JSON Schema of the arguments, prepared for llguidance. Its type is an object.
    lenient: ignore keywords that cannot be enforced; otherwise they are errors.
    """

    name: str
    parameters: Mapping[str, Any]
    lenient: bool


class CallParser(ABC):
    """Incremental parser of the tool calls of one completion. `push` gets the text after the format's opening."""

    @abstractmethod
    def push(self, text: str) -> list[Part]:
        """Add the next text; return the new parts: calls, and pieces of their arguments.

        However the text is cut into pieces, the result has the same names of calls and the same joined arguments.
        """

    def passes(self, text: str) -> bool:
        """Return True if `push` would return exactly this text, as one piece of arguments.

        A fast path: after True the caller skips `push`. `text` is not empty. False is always a safe result.
        """
        return False

    def flush(self) -> list[Part]:
        """End the completion, which may have been cut off: return the parts held back. By default there are none."""
        return []


class SteppedCallParser(CallParser):
    """Call parser as a state machine: `_step` is the method of the current state, at first `_begin_call`.

    A state method moves held text to the list of parts in its argument, and may set the next state. It returns False if
    it needs more text.
    """

    def __init__(self) -> None:
        self._held = ""
        self._step: Callable[[list[Part]], bool] = self._begin_call

    @abstractmethod
    def _begin_call(self, parts: list[Part]) -> bool: ...

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._held and self._step(parts):
            pass
        return parts


@dataclass(frozen=True, kw_only=True)
class ToolFormat(ABC):
    """Format of tool calls: its grammar, which makes every call valid, and its parser, which may rely on the grammar.

    name: value of --tool-format.
    template_regex: regular expression that finds a chat template in Jinja that writes tool calls in this format.
    opening: text that begins the first call.
    separator, closing: text between two calls, and after the last call.
    marks: tags of this format, such as <tool_call>, that may be single tokens. Without a token, a tag is plain text.
    begins_text: calls are recognized only at the beginning of the text, after whitespace.
    id_length: number of letters and digits in a call's id; None: the id is `call_` and 24 characters.
    """

    name: str
    template_regex: str
    opening: str
    separator: str = ""
    closing: str = ""
    marks: tuple[str, ...] = ()
    begins_text: bool = False
    id_length: int | None = None

    def is_used_by(self, template: str) -> bool:
        """Return True if a chat template in Jinja writes tool calls in this format."""
        return re.search(self.template_regex, template, re.DOTALL) is not None

    @abstractmethod
    def call(self, tool: ToolSchema, document: LarkDocument) -> str:
        """Return the Lark expression of one call of a tool, without `opening`, `separator` and `closing`.

        Raises:
            GrammarError: the schema of the arguments cannot be enforced in this format.
        """

    def calls(self, tools: Sequence[ToolSchema], document: LarkDocument, *, is_parallel: bool) -> str:
        """Return the Lark expression of the text after `opening`: one call, or with `is_parallel` one or more."""
        call = document.rule(" | ".join(self.call(tool, document) for tool in tools))
        more = f"({document.literal(self.separator)} {call})*" if is_parallel else ""
        return f"{call} {more} {document.literal(self.closing)}"

    def auto(self, document: LarkDocument, calls: str) -> str:
        """Return the Lark expression of a completion in which calls are optional: text alone, or text, opening, calls.

        calls: expression that `calls` returned.
        """
        if self.begins_text:
            return f"{document.text_not_begun_by(self.opening)} | {document.begun_by(self.opening)} {calls}"
        return f"{document.text_without(self.opening)} | {document.until(self.opening)} {calls}"

    @abstractmethod
    def parser(self, tools: Sequence[ToolSchema]) -> CallParser:
        """Return a parser for the calls of one completion. `tools`: the tools that the grammar allows."""

    @abstractmethod
    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return a call as text for a prompt's conversation, without `opening`, `separator` and `closing`."""


def safe_length(text: str, mark: str) -> int:
    """Return the length of the text without its longest suffix that may be the beginning of `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return len(text) - length
    return len(text)
