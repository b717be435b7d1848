"""Incremental parser of a chat completion: separates reasoning, text and tool calls. Torch-free."""

from collections.abc import Sequence
from enum import Enum, auto

from model.chat.reasoning import ReasoningFormat
from model.chat.tool_formats.tool_format import Part, PartKind, ToolFormat, ToolSchema, safe_length

# An attribute of an enum class takes 10 times as long to read as a global variable (Python 3.11).
_TEXT, _REASONING, _ARGUMENTS = PartKind.TEXT, PartKind.REASONING, PartKind.ARGUMENTS


class _State(Enum):
    UNDECIDED = auto()  # before the first character that is not whitespace: reasoning or text
    REASONING = auto()
    LEADING = auto()  # before the text's first character that is not whitespace
    TEXT = auto()
    CALLS = auto()


_IN_TEXT, _IN_REASONING, _IN_CALLS = _State.TEXT, _State.REASONING, _State.CALLS


class OutputParser:
    """Parser of one completion. `push` each piece of its text, then `flush` once.

    However the text is cut into pieces, the returned parts have the same texts, joined by kind. Whitespace around
    reasoning and before tool calls is dropped.

    Args:
        reasoning: tags around the model's reasoning, such as <think>; None: such tags are text.
        is_reasoning: True if the prompt ends inside reasoning, False if after it; None: either may follow.
        tools: format of tool calls; None: text that looks like a call is text.
        schemas: tools that may be called.

    num_calls: tool calls begun so far. has_reasoned: True once reasoning has begun.
    """

    def __init__(
        self,
        *,
        reasoning: ReasoningFormat | None,
        is_reasoning: bool | None = None,
        tools: ToolFormat | None = None,
        schemas: Sequence[ToolSchema] = (),
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._calls = None if tools is None else tools.parser(schemas)
        # First characters of the marks that end reasoning and text. None: no call can begin within text.
        self._reasoning_end = "" if reasoning is None else reasoning.closing[0]
        self._text_end = None if tools is None or tools.begins_text else tools.opening[0]
        self._held = ""
        self._state = _State.TEXT if tools is None else _State.LEADING
        if reasoning is not None and is_reasoning is not False:
            self._state = _State.REASONING if is_reasoning else _State.UNDECIDED
        self.has_reasoned = self._state is _State.REASONING
        self._has_shown_reasoning = False
        self.num_calls = 0

    @property
    def may_reason(self) -> bool:
        """Return True while the next text can be reasoning: until reasoning has ended, or other text has begun."""
        return self._state in (_State.UNDECIDED, _State.REASONING)

    def plain_kind(self, text: str) -> PartKind | None:
        """Return the kind of a text that `push` would return unchanged, as one part; None if only `push` can decide.

        A fast path, which is enough for most tokens: a caller needs `push` only after None.
        """
        if self._held or not text:
            return None
        state = self._state
        if state is _IN_TEXT:
            end = self._text_end
            return _TEXT if end is None or not (end in text or text[-1].isspace()) else None
        if state is _IN_REASONING:
            is_inner = self._has_shown_reasoning and self._reasoning_end not in text and not text[-1].isspace()
            return _REASONING if is_inner else None
        is_inner = state is _IN_CALLS and self._calls is not None and self._calls.passes(text)
        return _ARGUMENTS if is_inner else None

    def push(self, text: str) -> list[Part]:
        """Add the next text of the completion; return the text whose kind is now certain, as parts or their pieces."""
        if (kind := self.plain_kind(text)) is not None:
            return [Part(kind, text)]
        self._held += text
        parts: list[Part] = []
        while self._held and self._advance(parts):
            pass
        return parts

    def flush(self) -> list[Part]:
        """End the completion: return the parts that were held back because more text could have changed their kind."""
        held, self._held = self._held, ""
        if self._state is _State.CALLS:
            assert self._calls is not None
            return self._counted(self._calls.flush())
        if self._state is _State.REASONING:
            return [Part(PartKind.REASONING, held.rstrip())] if held.strip() else []
        if self._state is _State.LEADING and self.has_reasoned:
            held = held.lstrip()
        return [Part(PartKind.TEXT, held)] if held else []

    def _advance(self, parts: list[Part]) -> bool:
        """Process the held text in the current state; add finished parts to `parts`. Return True for a new state."""
        match self._state:
            case _State.UNDECIDED:
                return self._decide()
            case _State.REASONING:
                return self._pass_reasoning(parts)
            case _State.LEADING:
                return self._begin_text()
            case _State.TEXT:
                return self._pass_text(parts)
            case _State.CALLS:
                assert self._calls is not None
                held, self._held = self._held, ""
                parts += self._counted(self._calls.push(held))
                return False

    def _decide(self) -> bool:
        assert self._reasoning is not None
        begun, opening = self._held.lstrip(), self._reasoning.opening
        if begun.startswith(opening):
            self._held, self._state, self.has_reasoned = begun[len(opening) :], _State.REASONING, True
            return True
        if opening.startswith(begun):
            return False
        self._state = _State.TEXT if self._tools is None else _State.LEADING
        return True

    def _pass_reasoning(self, parts: list[Part]) -> bool:
        assert self._reasoning is not None
        closing = self._reasoning.closing
        held = self._held if self._has_shown_reasoning else self._held.lstrip()
        end = held.find(closing)
        shown = held[: end if end >= 0 else safe_length(held, closing)].rstrip()
        if shown:
            self._has_shown_reasoning = True
            parts.append(Part(PartKind.REASONING, shown))
        if end < 0:
            self._held = held[len(shown) :]
            return False
        self._held, self._state = held[end + len(closing) :], _State.LEADING
        return True

    def _begin_text(self) -> bool:
        begun = self._held.lstrip()
        if self._tools is not None and begun.startswith(self._tools.opening):
            self._held, self._state = begun[len(self._tools.opening) :], _State.CALLS
            return True
        if not begun or (self._tools is not None and self._tools.opening.startswith(begun)):
            return False
        self._state = _State.TEXT
        if self.has_reasoned:
            self._held = begun
        return True

    def _pass_text(self, parts: list[Part]) -> bool:
        held, self._held = self._held, ""
        if self._tools is None or self._tools.begins_text:
            parts.append(Part(PartKind.TEXT, held))
            return False
        opening = self._tools.opening
        found = held.find(opening)
        # Whitespace is held back, because a call may follow.
        shown = held[: found if found >= 0 else safe_length(held, opening)].rstrip()
        if shown:
            parts.append(Part(PartKind.TEXT, shown))
        if found < 0:
            self._held = held[len(shown) :]
            return False
        self._held, self._state = held[found + len(opening) :], _State.CALLS
        return True

    def _counted(self, parts: list[Part]) -> list[Part]:
        self.num_calls += sum(part.kind is PartKind.CALL for part in parts)
        return parts
