"""Tool formats that write a call as fixed text around the tool's name and the arguments in JSON."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model.chat.tool_formats.tool_format import CallParser, Part, PartKind, ToolFormat, ToolSchema
from model.structured_output.lark_document import LarkDocument

_STRUCTURE = re.compile(r'["\\{}\[\]]')


class JsonEnd:
    """Incremental search for the end of a JSON object or list."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def passes(self, text: str) -> bool:
        """Return True if the next text is inside a string and does not end it, so that `find` would change nothing."""
        return self._in_string and not self._is_escaped and '"' not in text and "\\" not in text

    def find(self, text: str) -> int | None:
        """Search the next text. Return the position after the JSON value's last character, None if it goes on."""
        start = 0
        if self._is_escaped and text:
            self._is_escaped, start = False, 1
        while found := _STRUCTURE.search(text, start):
            start, character = found.end(), found[0]
            if self._in_string:
                if character == "\\":
                    self._is_escaped = start == len(text)
                    start += 1
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return start
        return None


@dataclass(frozen=True, kw_only=True)
class JsonCalls(ToolFormat):
    """Tool format whose call is `before_name`, the name, `after_name`, the arguments in JSON, and `after_arguments`.

    before_id: with `id_length`, text between the name and an id that the model writes, which the parser ignores.
    """

    before_name: str
    after_name: str
    after_arguments: str = ""
    before_id: str = ""

    def call(self, tool: ToolSchema, document: LarkDocument) -> str:
        head = document.literal(f"{self.before_name}{tool.name}{self.before_id}")
        if self.before_id:
            head += f" {document.terminal(f'/[a-zA-Z0-9]{{{self.id_length}}}/')}"
        arguments = document.json(tool.parameters, lenient=tool.lenient)
        return f"{head} {document.literal(self.after_name)} {arguments} {document.literal(self.after_arguments)}"

    def parser(self, tools: Sequence[ToolSchema]) -> CallParser:
        return _JsonCallParser(self)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        written = json.dumps(arguments, ensure_ascii=False)
        id_ = f"{self.before_id}{'0' * (self.id_length or 0)}" if self.before_id else ""
        return f"{self.before_name}{name}{id_}{self.after_name}{written}{self.after_arguments}"


class _JsonCallParser(CallParser):
    def __init__(self, form: JsonCalls) -> None:
        self._form = form
        self._held = ""  # text before a name, or after arguments
        self._end: JsonEnd | None = None  # set within arguments
        self._is_first = True

    def passes(self, text: str) -> bool:
        return self._end is not None and self._end.passes(text)

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        while text:
            if self._end is None:
                self._held += text
                text = self._begin_call(parts)
            else:
                text = self._continue_arguments(self._end, text, parts)
        return parts

    def _begin_call(self, parts: list[Part]) -> str:
        """Add the call that begins the held text to `parts`. Return the text after its name and `after_name`.

        Returns "", and adds nothing, while the call's name is incomplete.
        """
        form = self._form
        before = form.before_name if self._is_first else form.after_arguments + form.separator + form.before_name
        if not self._held.startswith(before):
            return ""
        end = self._held.find(form.after_name, len(before))
        if end < 0:
            return ""
        name = self._held[len(before) : end]
        parts.append(Part(PartKind.CALL, name.split(form.before_id)[0] if form.before_id else name))
        rest, self._held = self._held[end + len(form.after_name) :], ""
        self._end, self._is_first = JsonEnd(), False
        return rest

    def _continue_arguments(self, end: JsonEnd, text: str, parts: list[Part]) -> str:
        """Add a piece of the arguments to `parts`. Return the text after the arguments, "" if they go on."""
        position = end.find(text)
        if position is None:
            parts.append(Part(PartKind.ARGUMENTS, text))
            return ""
        parts.append(Part(PartKind.ARGUMENTS, text[:position]))
        self._end = None
        return text[position:]
