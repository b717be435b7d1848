"""Formats found from chat templates, and chat requests for templates that read tools in different ways."""

import asyncio
import json
from contextlib import closing
from typing import Any

import pytest

from model.chat.template import PLAIN_SOURCE, ChatTemplate
from model.tokenizer.byte_level import ByteLevelTokenizer
from service.config.flags import SettingsError
from service.preprocess.chat_format import ChatFormat, read_chat_format
from service.preprocess.chat_renderer import ChatPlan, ChatPrompts
from service.preprocess.template_process import TemplateProcess
from service.protocol.chat import ChatCompletionRequest
from service.protocol.errors import InvalidRequest

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
CONVERSATION = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
IN_VARIABLE = "{{ tools | tojson if tools }}" + CONVERSATION
IN_MESSAGE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }}"
    "{% if 'tools' in message and message['tools'] is not none %}|{{ message['tools'] }}|{% endif %};{% endfor %}"
)
JOINS_TEXT = CONVERSATION + (
    "{% for m in messages if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}"
    "{% endfor %}{% endfor %}"
)
WRITES_OBJECTS = CONVERSATION + (
    "{% for m in messages if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}"
)


def read(source: str, tokenizer: ByteLevelTokenizer, **formats: str) -> ChatFormat:
    names = {"tool_format": "auto", "reasoning_format": "auto", **formats}
    with closing(TemplateProcess(source)) as process:
        return read_chat_format(ChatTemplate(source=source, origin="here"), process, tokenizer, **names)


def plan(source: str, tokenizer: ByteLevelTokenizer, body: dict[str, Any], **formats: str) -> tuple[ChatPlan, str]:
    """Return the plan of a chat request, and the text of its prompt."""
    form = read(source, tokenizer, **formats)
    asked = ChatCompletionRequest.parse(json.dumps({"messages": [{"role": "user", "content": "hi"}], **body}).encode())
    with closing(ChatPrompts(ChatTemplate(source=source, origin="here"), tokenizer, form)) as prompts:
        made = asyncio.run(prompts.plan(asked))
    return made, tokenizer.decode(made.token_ids)


@pytest.mark.parametrize(
    ("source", "place"),
    [(CONVERSATION, "text"), (IN_VARIABLE, "variable"), (IN_MESSAGE, "message"), (PLAIN_SOURCE, "text")],
)
def test_the_template_decides_where_the_tools_go(tokenizer: ByteLevelTokenizer, source: str, place: str) -> None:
    assert read(source, tokenizer).tools_go_to == place


def test_past_arguments_are_text_only_for_a_template_that_joins_them(tokenizer: ByteLevelTokenizer) -> None:
    assert read(JOINS_TEXT, tokenizer).arguments_are_text
    assert not read(WRITES_OBJECTS, tokenizer).arguments_are_text
    assert not read(CONVERSATION, tokenizer).arguments_are_text


def test_tools_reach_each_kind_of_template(tokenizer: ByteLevelTokenizer) -> None:
    function = json.dumps(TOOL["function"])
    assert plan(IN_VARIABLE, tokenizer, {"tools": [TOOL]})[1] == json.dumps([TOOL]) + "user:hi;"
    assert plan(IN_MESSAGE, tokenizer, {"tools": [TOOL]})[1] == f"system:|[{function}]|;user:hi;"
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert plan(IN_MESSAGE, tokenizer, {"tools": [TOOL], "messages": system})[1].startswith(
        f"system:Be brief.|[{function}]|;"
    )
    described = plan(CONVERSATION, tokenizer, {"tools": [TOOL]})[1]
    assert described.startswith("system:You can call functions.")
    assert function in described
    assert plan(IN_VARIABLE, tokenizer, {"tools": [TOOL], "tool_choice": "none"})[1] == "user:hi;"


def test_a_base_model_takes_strict_tools_only_with_an_explicit_format(tokenizer: ByteLevelTokenizer) -> None:
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    with pytest.raises(InvalidRequest, match="'f' is strict, but the model's format of tool calls is unknown"):
        plan(PLAIN_SOURCE, tokenizer, {"tools": [strict]})
    for made, _ in (
        plan(PLAIN_SOURCE, tokenizer, {"tools": [strict]}, tool_format="hermes"),
        plan(CONVERSATION, tokenizer, {"tools": [strict]}),
    ):
        assert made.constraint is not None
        assert made.constraint.content["tools"][0]["lenient"] is False


@pytest.mark.parametrize("formats", [{"tool_format": "hermit"}, {"reasoning_format": "thinking"}])
def test_an_unknown_format_is_one_line_that_lists_the_formats(
    tokenizer: ByteLevelTokenizer, formats: dict[str, str]
) -> None:
    with pytest.raises(SettingsError, match="there is no such format; choose one of auto,"):
        read(CONVERSATION, tokenizer, **formats)


@pytest.mark.parametrize(
    ("body", "max_tokens"),
    [
        ({}, None),
        ({"reasoning_effort": "high"}, None),
        ({"reasoning_effort": "low"}, 1024),
        ({"reasoning_effort": "none"}, 0),
        ({"reasoning_effort": "low", "thinking_token_budget": 7}, 7),
    ],
)
def test_effort_and_budget_limit_the_reasoning(
    tokenizer: ByteLevelTokenizer, body: dict[str, Any], max_tokens: int | None
) -> None:
    """A budget of the client is enforced or rejected; an effort limits only if the closing mark is one token."""
    source = CONVERSATION + "<think>"
    form = read(source, tokenizer, reasoning_format="think")
    single = ChatFormat(reasoning=form.reasoning, mark_ids={"</think>": 5}, variables=form.variables)
    asked = ChatCompletionRequest.parse(json.dumps({"messages": [{"role": "user", "content": "hi"}], **body}).encode())
    for known, limit in ((single, max_tokens), (form, body.get("thinking_token_budget"))):
        with closing(ChatPrompts(ChatTemplate(source=source, origin="here"), tokenizer, known)) as prompts:
            constraint = asyncio.run(prompts.plan(asked)).constraint
        assert (None if constraint is None else constraint.content["max_reasoning_tokens"]) == limit
