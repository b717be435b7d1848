"""Formats of a served model's chat completions: tool calls and reasoning, found from its chat template."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from model.chat.output_parser import OutputParser
from model.chat.reasoning import REASONING_FORMATS, ReasoningFormat, all_marks, find_reasoning_format, mark_ids
from model.chat.template import PLAIN_SOURCE, ChatTemplate
from model.chat.template_sandbox import TemplateFailure
from model.chat.tool_formats.table import DEFAULT_FORMAT, TOOL_FORMATS, find_tool_format
from model.chat.tool_formats.tool_format import ToolFormat, ToolSchema
from model.tokenizer.interface import Tokenizer
from service.config.flags import SettingsError
from service.preprocess.template_process import TemplateProcess

_MESSAGE_TOOLS = re.compile(r"""message(\.tools|\[['"]tools['"]\])|['"]tools['"] in message""")
_PROBE = {"kvasir_key": "kvasir_value"}
_PROBE_IN_JSON = re.compile(r'"kvasir_key":\s*"kvasir_value"')


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatFormat:
    """Formats in which a model writes tool calls and reasoning, and in which its chat template expects tools.

    tools: format of tool calls.
    reasoning: format of the model's reasoning, such as <think> tags around it; None: the model does not reason.
    tools_go_to: place where the chat template expects the tools. variable: the variable `tools`. message: the field
        `tools` of the system message, as JSON text (Phi-4-mini). text: nowhere, so Kvasir writes the tools into the
        messages' text.
    is_plain: the plain chat template is used and --tool-format is auto, so the model's format of calls is unknown.
    arguments_are_text: the template expects the arguments of past calls as JSON text, not as an object.
    variables: names of variables that the template reads.
    mark_ids: token ids of the tags of tool calls and reasoning, such as <think>, that are single tokens; by text.
    """

    tools: ToolFormat = DEFAULT_FORMAT
    reasoning: ReasoningFormat | None = None
    tools_go_to: Literal["variable", "message", "text"] = "text"
    is_plain: bool = False
    arguments_are_text: bool = False
    variables: frozenset[str] = frozenset()
    mark_ids: Mapping[str, int] = field(default_factory=dict)

    def new_parser(self, schemas: Sequence[ToolSchema], is_reasoning: bool | None) -> Callable[[], OutputParser] | None:
        """Return a function that creates a parser for one completion; None if every completion is plain text.

        schemas: tools that the completion may call.
        is_reasoning: see `OutputParser`.
        """
        if not schemas and self.reasoning is None:
            return None
        return partial(
            OutputParser,
            reasoning=self.reasoning,
            is_reasoning=is_reasoning,
            tools=self.tools if schemas else None,
            schemas=schemas,
        )

    def visible_token_ids(self, tokenizer: Tokenizer, *, has_tools: bool) -> tuple[int, ...]:
        """Return the ids of the special tokens that tag reasoning and, with `has_tools`, tool calls.

        The completion's text must show these tokens, because a parser finds reasoning and tool calls by them.
        """
        marks = () if self.reasoning is None else (self.reasoning.opening, self.reasoning.closing)
        names = (*marks, *(self.tools.marks if has_tools else ()))
        return tuple(tokenizer.special_tokens[name] for name in names if name in tokenizer.special_tokens)

    def describe(self) -> dict[str, object]:
        """Return the names of the formats by setting, `tool_format` and `reasoning_format`, to print at start-up."""
        place = ", described in the system message" if self.tools_go_to == "text" else ""
        return {
            "tool_format": f"{self.tools.name}{place}",
            "reasoning_format": "none" if self.reasoning is None else self.reasoning.name,
        }


def read_chat_format(
    template: ChatTemplate, process: TemplateProcess, tokenizer: Tokenizer, *, tool_format: str, reasoning_format: str
) -> ChatFormat:
    """Return the formats of tool calls and reasoning that a model with this chat template uses.

    tool_format, reasoning_format: name of a format, or auto: found from the template. reasoning_format: also none.
    Raises SettingsError for an unknown name, and TemplateFailure if the template cannot be compiled.
    """
    source = template.source
    for flag, name, names in (
        ("--tool-format", tool_format, ["auto", *TOOL_FORMATS]),
        ("--reasoning-format", reasoning_format, ["auto", "none", *REASONING_FORMATS]),
    ):
        if name not in names:
            raise SettingsError(f"{flag} {name}: there is no such format; choose one of {', '.join(names)}")
    found = find_tool_format(source) if tool_format == "auto" else TOOL_FORMATS[tool_format]
    reasoning = REASONING_FORMATS.get(reasoning_format)
    if reasoning_format == "auto":
        reasoning = find_reasoning_format(source)
    return ChatFormat(
        tools=found or DEFAULT_FORMAT,
        reasoning=reasoning,
        tools_go_to=_tools_place(source),
        is_plain=source == PLAIN_SOURCE and tool_format == "auto",
        arguments_are_text="tool_calls" in source and _wants_text(template, process),
        variables=frozenset(re.findall(r"\b[a-z_]+\b", source)),
        mark_ids=mark_ids(tokenizer, all_marks()),
    )


def _tools_place(source: str) -> Literal["variable", "message", "text"]:
    if "tools" in _MESSAGE_TOOLS.sub("", source):
        return "variable"
    return "message" if _MESSAGE_TOOLS.search(source) else "text"


def _wants_text(template: ChatTemplate, process: TemplateProcess) -> bool:
    """Return True if a template writes the arguments of past calls correctly only from JSON text.

    A probe conversation is rendered with an object as arguments. A template that joins the arguments with other text
    fails on an object, or writes something that is not JSON.
    """
    function = {"name": "probe", "arguments": _PROBE}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "probe"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a" * 9, "type": "function", "function": function}]},
    ]
    variables = template.variables(messages, add_generation_prompt=False)

    def writes(arguments: object) -> bool:
        function["arguments"] = arguments  # type: ignore[assignment]
        try:
            return _PROBE_IN_JSON.search(process.render(variables)) is not None
        except TemplateFailure:
            return False

    return not writes(_PROBE) and writes('{"kvasir_key": "kvasir_value"}')
