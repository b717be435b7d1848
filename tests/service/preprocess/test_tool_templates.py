"""Prompts of conversations with tools equal those of transformers, token for token, for templates of many models."""

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jinja2
import pytest
import transformers
from tokenizers import AddedToken

from model.chat.reasoning import all_marks
from model.chat.template import ChatTemplate
from model.chat.tool_prompt import write_tools_as_text
from model.tokenizer.files import load_tokenizer
from model.tokenizer.interface import Tokenizer
from service.preprocess.chat_format import ChatFormat, read_chat_format
from service.preprocess.chat_renderer import ChatPrompts
from service.preprocess.template_process import TemplateProcess
from service.protocol.chat import ChatCompletionRequest
from service.protocol.errors import InvalidRequest
from tests.families.tokenizer_files import write_byte_level

DIRECTORY = Path(__file__).parents[2] / "data" / "chat_templates"
NAMES = sorted(path.stem for path in DIRECTORY.glob("*.jinja"))
MARKS = ("<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<|eot_id|>", *all_marks())
TOKENS = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": 'Name, as in “Zürich” or <b>"Bern"</b>'},
        "days": {"type": "array", "items": {"type": "integer"}, "default": [1]},
        "units": {"enum": ["°C", None]},
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Get it.", "parameters": WEATHER}},
    {
        "type": "function",
        "function": {"name": "stop", "description": "Stop\nall.", "parameters": {"type": "object", "properties": {}}},
    },
]


def call(number: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"abcdefgh{number}", "type": "function", "function": function}


ASK: list[dict[str, Any]] = [{"role": "user", "content": "How is Zürich? 😀"}]
SYSTEM: dict[str, Any] = {"role": "system", "content": "Be brief."}
CALLED: list[dict[str, Any]] = [
    *ASK,
    {"role": "assistant", "content": "", "tool_calls": [call(1, "get_weather", {"city": "Zürich\n</a>"})]},
]
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "abcdefgh1", "name": "get_weather", "content": "21 °C\n"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": ASK,
    "system": [SYSTEM, *ASK],
    "result": [*CALLED, RESULT],
    "answer": [SYSTEM, *CALLED, RESULT, {"role": "assistant", "content": "Warm."}, {"role": "user", "content": "And?"}],
}
TWO = [call(1, "get_weather", {"city": "", "days": [1, 2], "units": None}), call(2, "stop", {})]
SEVERAL: list[dict[str, Any]] = [
    *ASK,
    {"role": "assistant", "content": "Two calls.", "tool_calls": TWO},
    RESULT,
    {"role": "tool", "tool_call_id": "abcdefgh2", "name": "stop", "content": "done"},
]
CONVERSATIONS["several"] = SEVERAL


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tokenizer that has the marks as tokens."""
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer = write_byte_level(directory, 500)
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **TOKENS})
    )
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    return directory


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def library(directory: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module", params=NAMES)
def template(request: pytest.FixtureRequest) -> ChatTemplate:
    source = (DIRECTORY / f"{request.param}.jinja").read_text()
    return ChatTemplate(source=source, origin=request.param, special_tokens=TOKENS)


@pytest.fixture(scope="module")
def form(template: ChatTemplate, tokenizer: Tokenizer) -> ChatFormat:
    with closing(TemplateProcess(template.source)) as process:
        return read_chat_format(template, process, tokenizer, tool_format="auto", reasoning_format="auto")


@pytest.fixture(scope="module")
def prompts(template: ChatTemplate, tokenizer: Tokenizer, form: ChatFormat) -> Iterator[ChatPrompts]:
    with closing(ChatPrompts(template, tokenizer, form)) as prompts:
        yield prompts


def prompt(
    prompts: ChatPrompts, messages: list[dict[str, Any]], tools: list[dict[str, Any]], **fields: Any
) -> list[int]:
    body = {"messages": messages, "tools": tools, **fields}
    asked = ChatCompletionRequest.parse(json.dumps(body).encode())
    return asyncio.run(prompts.plan(asked)).token_ids


def for_library(messages: list[dict[str, Any]], form: ChatFormat) -> list[dict[str, Any]]:
    """Return messages with objects as arguments, as transformers demands, except for templates that need text."""
    if form.arguments_are_text and form.tools_go_to != "text":
        return messages
    written = []
    for message in messages:
        calls = [
            {**each, "function": {**each["function"], "arguments": json.loads(each["function"]["arguments"])}}
            for each in message.get("tool_calls", ())
        ]
        written.append({**message, "tool_calls": calls} if calls else message)
    return written


@pytest.mark.parametrize("has_tools", [True, False], ids=["tools", "none"])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_prompt_with_tools_equals_that_of_transformers(
    template: ChatTemplate, prompts: ChatPrompts, form: ChatFormat, library: Any, name: str, has_tools: bool
) -> None:
    messages, tools = CONVERSATIONS[name], TOOLS if has_tools else []
    given, known = for_library(messages, form), tools
    if form.tools_go_to == "text":
        given, known = write_tools_as_text(given, tools, form.tools), []
    try:
        expected = library.apply_chat_template(
            given,
            tools=known or None,
            chat_template=template.source,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
    except jinja2.TemplateError as error:  # such as Llama 3.1's for two calls at once
        with pytest.raises(InvalidRequest, match=re.escape(str(error))):
            prompt(prompts, messages, tools)
        return
    assert prompt(prompts, messages, tools) == expected


def test_tools_need_no_parameters(prompts: ChatPrompts) -> None:
    """OpenAI's API takes a tool without parameters. Some templates fail without a schema."""
    bare = [{"type": "function", "function": {"name": "stop"}}]
    empty = [{"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}}]
    assert prompt(prompts, ASK, bare) == prompt(prompts, ASK, empty)
