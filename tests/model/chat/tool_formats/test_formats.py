"""Every tool format: its grammar accepts written calls, its parser reads them, and random calls are valid."""

import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.chat.tool_formats.table import TOOL_FORMATS
from model.chat.tool_formats.tool_format import ToolSchema
from model.structured_output.grammar import GrammarError
from tests.model.chat.tool_formats.samples import (
    CUTS,
    Calls,
    byte_tokens,
    calls_of,
    joined,
    pieces,
    tool_lists,
    tools_and_calls,
    written,
)

each_format = pytest.mark.parametrize("name", TOOL_FORMATS)
each_tokenizer = pytest.mark.parametrize("has_marks", [True, False], ids=["marks", "plain"])


@each_format
@settings(max_examples=10)
@given(case=tools_and_calls(), cuts=CUTS)
def test_written_calls_are_accepted_and_parsed(
    name: str, case: tuple[list[ToolSchema], Calls], cuts: list[int]
) -> None:
    form, (tools, calls) = TOOL_FORMATS[name], case
    text = written(form, calls)
    for has_marks in (True, False):
        tokens = byte_tokens(has_marks=has_marks)
        assert tokens.rejected(tokens.matcher(form, tools), form.opening + text) is None
    parser = form.parser(tools)
    parts = [part for piece in pieces(text, cuts) for part in parser.push(piece)]
    assert calls_of(parts) == calls
    assert joined(parts) == joined(form.parser(tools).push(text))
    assert parser.flush() == []


@each_format
@settings(max_examples=10)
@given(tools=tool_lists(), seed=st.integers(0, 2**32))
def test_random_calls_of_the_grammar_are_valid(name: str, tools: list[ToolSchema], seed: int) -> None:
    form = TOOL_FORMATS[name]
    validators = {tool.name: jsonschema.validators.validator_for(tool.parameters)(tool.parameters) for tool in tools}
    for has_marks in (True, False):
        tokens = byte_tokens(has_marks=has_marks)
        text = tokens.walk(tokens.matcher(form, tools), random.Random(seed))
        if text is None:
            continue
        assert text.startswith(form.opening)
        calls = calls_of(form.parser(tools).push(text.removeprefix(form.opening)))
        assert calls
        for called, arguments in calls:
            validators[called].validate(arguments)


@each_tokenizer
@each_format
def test_texts_of_a_client_are_no_marks_and_no_grammar(name: str, has_marks: bool) -> None:
    form, tokens = TOOL_FORMATS[name], byte_tokens(has_marks=has_marks)
    marks = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|tool_call_end|>", "<think></think>")
    for text in (*marks, "", "/", "/*#//", '"]}', "\\u0041", "<[284]>", "@g0", "%json {}", "😀\u2028", "\n"):
        schemas = {"a": {"const": text}, "b": {"enum": [text, "b"]}, "c": {"type": "string", "enum": [text]}}
        schemas["d"] = _object({text: {"const": 1}})
        tools = [ToolSchema(name="f", parameters=_object(schemas), lenient=False)]
        found = tokens.walk(tokens.matcher(form, tools, parallel=False), random.Random(1))
        assert found is not None
        ((_, arguments),) = calls_of(form.parser(tools).push(found.removeprefix(form.opening)))
        jsonschema.validate(arguments, tools[0].parameters)


def _object(parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("qwen3_coder", "a\n</parameter>\nb"),
        ("qwen3_coder", "\n</parameter>"),  # with the closing tag, the first closing tag begins within the value
        ("glm4", "</arg_value>\n"),
    ],
)
def test_a_value_with_the_closing_tag_is_rejected(name: str, value: str) -> None:
    tools = [ToolSchema(name="f", parameters=_object({"a": {"enum": ["b", value]}}), lenient=False)]
    with pytest.raises(GrammarError, match=r"the value .* cannot be enforced in the .* format; remove the value"):
        byte_tokens(has_marks=True).matcher(TOOL_FORMATS[name], tools)
