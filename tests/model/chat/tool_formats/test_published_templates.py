"""Chat templates in the shape of published models: detected formats, and calls as the templates write them."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from model.chat.output_parser import OutputParser
from model.chat.reasoning import find_reasoning_format
from model.chat.template import ChatTemplate
from model.chat.tool_formats.table import DEFAULT_FORMAT, TOOL_FORMATS, find_tool_format
from model.chat.tool_formats.tool_format import ToolSchema
from tests.model.chat.tool_formats.samples import byte_tokens, calls_of, written
from tests.model.chat_templates import TEMPLATES

DIRECTORY = Path(__file__).parents[3] / "data" / "chat_templates"
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "n": {"type": "integer"},
        "is_on": {"type": "boolean"},
        "days": {"type": "array", "items": {"type": "string"}},
    },
    "required": [],
    "additionalProperties": False,
}
TOOLS = [ToolSchema(name=name, parameters=PARAMETERS, lenient=False) for name in ("get_weather", "g")]
CALLS = [
    ("get_weather", {"city": 'Zürich\n"Old Town" </a>', "n": -3, "days": ["Mon", "Tue"]}),
    ("g", {}),
    ("g", {"city": ""}),
]
NUMBERS = [("get_weather", {"n": 3}), ("g", {})]


class Expected(NamedTuple):
    form: str
    end: str
    reasoning: str | None = None
    arguments_are_text: bool = False
    calls: list[tuple[str, Any]] = CALLS


EXPECTED = {
    "qwen2.5": Expected("hermes", "<|im_end|>\n"),
    "qwen3": Expected("hermes", "<|im_end|>\n", "think"),
    "hermes2": Expected("hermes", "<|im_end|>\n"),
    "qwen3-coder": Expected("qwen3_coder", "<|im_end|>\n"),
    "llama3.1": Expected("llama3_json", "<|eot_id|>", calls=CALLS[:1]),
    # This template writes strings without quotes, so only numbers are in the format that it asks for.
    "llama3.2-pythonic": Expected("pythonic", "<|eot_id|>", calls=NUMBERS),
    "mistral-v3": Expected("mistral_v3", "</s>"),
    "mistral-v3-tekken": Expected("mistral_v3_tekken", "</s>"),
    "mistral-v11": Expected("mistral_v11", "</s>"),
    "mistral-v13": Expected("mistral_v13", "</s>"),
    "granite3": Expected("granite", "<|end_of_text|>\n"),
    "phi4-mini": Expected("phi4_mini", "<|end|></s>"),
    "deepseek-v3": Expected("deepseek_v3", "<｜end▁of▁sentence｜>", arguments_are_text=True),
    "deepseek-v3.1": Expected("deepseek_v3.1", "<｜end▁of▁sentence｜>", "think", arguments_are_text=True),
}


def source(name: str) -> str:
    return (DIRECTORY / f"{name}.jinja").read_text()


def completion(name: str) -> str:
    """Return the text that a template writes for the calls of an assistant message, without its end."""
    expected = EXPECTED[name]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    template = ChatTemplate(
        source=source(name), origin="test", special_tokens={"bos_token": "<s>", "eos_token": "</s>"}
    )
    prompt = template.render(messages)
    calls = [
        {
            "id": "0" * 9,
            "type": "function",
            "function": {
                "name": called,
                "arguments": json.dumps(arguments, ensure_ascii=False) if expected.arguments_are_text else arguments,
            },
        }
        for called, arguments in expected.calls
    ]
    messages.append({"role": "assistant", "content": "", "tool_calls": calls})
    text = template.render(messages, add_generation_prompt=False)
    assert text.startswith(prompt.removesuffix("</think>"))
    return text.removeprefix(prompt).removesuffix(expected.end)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_formats_of_a_template_are_found(name: str) -> None:
    form, reasoning = find_tool_format(source(name)), find_reasoning_format(source(name))
    assert form is TOOL_FORMATS[EXPECTED[name].form]
    assert (None if reasoning is None else reasoning.name) == EXPECTED[name].reasoning


def test_every_template_of_the_directory_is_tested() -> None:
    assert {path.stem for path in DIRECTORY.glob("*.jinja")} == set(EXPECTED)


def test_the_page_of_tool_formats_lists_every_format() -> None:
    page = (Path(__file__).parents[4] / "docs" / "tools.md").read_text()
    assert set(re.findall(r"^\| `([a-z0-9_.]+)` \|", page, re.MULTILINE)) == set(TOOL_FORMATS)


@pytest.mark.parametrize("has_marks", [True, False], ids=["marks", "plain"])
@pytest.mark.parametrize("name", EXPECTED)
def test_the_grammar_accepts_the_calls_that_a_template_writes(name: str, has_marks: bool) -> None:
    expected, tokens = EXPECTED[name], byte_tokens(has_marks=has_marks)
    form = TOOL_FORMATS[expected.form]
    text = completion(name)
    if name.startswith("mistral-v3"):  # models do not write the ids that their template adds
        text = re.sub(r', "id": "0{9}"', "", text)
    parser = OutputParser(reasoning=find_reasoning_format(source(name)), tools=form, schemas=TOOLS)
    parts = [*parser.push(text), *parser.flush()]
    assert calls_of(parts) == expected.calls
    answer = text.removeprefix("<think>\n\n</think>\n\n")
    assert answer == form.opening + written(form, expected.calls)
    for auto in (False, True):
        assert tokens.rejected(tokens.matcher(form, TOOLS, auto=auto), answer) is None


@pytest.mark.parametrize("family", TEMPLATES)
def test_templates_without_tools_have_no_format(family: str) -> None:
    found = find_tool_format(TEMPLATES[family])
    assert found is (DEFAULT_FORMAT if "<tool_call>" in TEMPLATES[family] else None)


def test_marks_of_tool_calls_and_reasoning_are_known() -> None:
    marks = byte_tokens(has_marks=True).mark_ids
    assert {"<tool_call>", "[TOOL_CALLS]", "<｜tool▁sep｜>", "</think>", "[/THINK]"} <= set(marks)
