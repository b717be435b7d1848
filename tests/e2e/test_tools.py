"""Tool calls over HTTP, from random weights at temperature 1: each is valid for the client, streamed or not."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.chat.tool_formats.table import TOOL_FORMATS
from model.chat.tool_formats.tool_format import ToolSchema
from tests.e2e.process import Service, serving
from tests.model.chat.tool_formats.samples import tool_lists
from tests.service.streams import events, joined

pytestmark = pytest.mark.slow

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"
# Chat template by tool format; None: `PLAIN`, which does not show tools.
FORMATS = {
    "hermes": "qwen3",
    "mistral_v13": "mistral-v13",
    "qwen3_coder": "qwen3-coder",
    "pythonic": "llama3.2-pythonic",
    "described": None,
}
PLAIN = """\
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
DESCRIBED = {"described": "hermes"}  # the system message describes the tools
MESSAGES = [{"role": "user", "content": "How is the weather?"}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "units": {"type": "array", "items": {"enum": ["°C", 'in"ch', "two\nlines"]}, "maxItems": 2},
    },
    "required": ["city", "days", "units"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "stop-all": NOTHING}


def tools_of(schemas: dict[str, Any], *, strict: bool = True) -> list[dict[str, Any]]:
    """Return the request field `tools`."""
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in schemas.items()
    ]


TOOLS = tools_of(SCHEMAS)


def ask(service: Service, **fields: Any) -> dict[str, Any]:
    response = service.post("/v1/chat/completions", **{"messages": MESSAGES, "max_tokens": 1500, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def streamed(service: Service, **fields: Any) -> list[dict[str, Any]]:
    response = service.post("/v1/chat/completions", stream=True, **{"messages": MESSAGES, "max_tokens": 1500, **fields})
    assert response.status_code == 200, response.text
    return events(response.text)


def calls_of(choice: dict[str, Any], schemas: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the names and arguments of a choice's calls, after a check against the schemas."""
    calls = []
    for call in choice["message"].get("tool_calls", ()):
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        assert call["type"] == "function"
        jsonschema.validate(arguments, schemas[name])
        calls.append((name, arguments))
    assert bool(calls) is (choice["finish_reason"] == "tool_calls")
    return calls


def without_ids(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return choices without the ids of their calls, which differ between requests."""
    for choice in choices:
        for call in choice["message"].get("tool_calls", ()):
            del call["id"]
    return choices


@pytest.fixture(scope="module", params=FORMATS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def service(
    name: str, marked_checkpoint: Path, unmarked_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    template, directory = FORMATS[name], tmp_path_factory.mktemp("tools")
    (directory / "plain.jinja").write_text(PLAIN)
    path = directory / "plain.jinja" if template is None else TEMPLATES / f"{template}.jinja"
    flags = ["--chat-template", str(path)]
    if name in DESCRIBED:  # strict tools need the flag
        flags += ["--tool-format", DESCRIBED[name]]
    with serving(unmarked_checkpoint if template is None else marked_checkpoint, directory, *flags) as running:
        yield running


def test_the_format_is_found_from_the_template(service: Service, name: str) -> None:
    found = f"{DESCRIBED[name]}, described in the system message" if name in DESCRIBED else name
    printed = service.printed.read_text()
    assert re.search(rf"^tool_format +({re.escape(found)})$", printed, re.MULTILINE)


@settings(max_examples=3)  # tests/model/chat/tool_formats/test_formats.py has more, without a server
@given(tools=tool_lists(), seed=st.integers(0, 2**31), choice=st.sampled_from(["required", "named", "auto"]))
def test_calls_of_random_tools_are_valid(service: Service, tools: list[ToolSchema], seed: int, choice: str) -> None:
    schemas = {tool.name: dict(tool.parameters) for tool in tools}
    chosen: Any = choice if choice != "named" else {"type": "function", "function": {"name": tools[-1].name}}
    body = ask(service, tools=tools_of(schemas), tool_choice=chosen, seed=seed, n=4)
    ended = [each for each in body["choices"] if each["finish_reason"] != "length"]
    assert len(ended) >= 2
    for each in ended:
        calls = calls_of(each, schemas)
        assert calls or choice == "auto"
        assert choice != "named" or {called for called, _ in calls} == {tools[-1].name}


def test_a_stream_of_calls_equals_the_whole_message(service: Service, name: str) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "seed": 5, "n": 4}
    body = ask(service, **fields)
    chunks = streamed(service, **fields, stream_options={"include_usage": True})
    assert chunks[-1]["usage"]["completion_tokens"] == body["usage"]["completion_tokens"]
    assert chunks[-1]["usage"].get("completion_tokens_details") == body["usage"].get("completion_tokens_details")
    for choices in (body["choices"], (found := joined(chunks[:-1]))["choices"]):
        ids = [call["id"] for choice in choices for call in choice["message"]["tool_calls"]]
        assert len(set(ids)) == len(ids) >= 4
        pattern = "[a-zA-Z0-9]{9}" if name.startswith("mistral") else "call_[0-9a-f]{24}"
        assert all(re.fullmatch(pattern, each) for each in ids)
    assert without_ids(found["choices"]) == without_ids(body["choices"])
    pieces = [delta for chunk in chunks for each in chunk["choices"] for delta in each["delta"].get("tool_calls", ())]
    assert len(pieces) > 3 * len(ids), "arguments come in pieces"


@pytest.mark.parametrize("name", ["hermes", "pythonic"], indirect=True)  # calls with tags, and a list of calls
def test_parallel_calls_keep_their_order_and_can_be_switched_off(service: Service) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "n": 4, "return_token_ids": True}
    ends = service.post("/tokenize", prompt="]<|endoftext|><|im_end|>", parse_special=True).json()["tokens"]
    counts = set()
    for bias in (0, -3, -6, -9):  # the less likely an end is, the more calls a choice has
        biased = ask(service, **fields, seed=2, max_tokens=600, logit_bias=dict.fromkeys(map(str, ends), bias))
        for choice in biased["choices"]:
            if choice["finish_reason"] == "length":
                continue
            called = [name for name, _ in calls_of(choice, SCHEMAS)]
            text = service.post("/detokenize", tokens=choice["token_ids"]).json()["prompt"]
            assert re.findall("|".join(SCHEMAS), text) == called
            counts.add(len(called))
    assert len(counts) > 1
    alone = ask(service, **fields, seed=2, parallel_tool_calls=False)
    assert [len(calls_of(choice, SCHEMAS)) for choice in alone["choices"]] == [1] * 4


def test_without_a_demand_text_has_no_marks_and_calls_are_valid(service: Service, name: str) -> None:
    form = TOOL_FORMATS[DESCRIBED.get(name, name)]
    numbers = set()
    for strict in (True, False):
        for choice in ask(service, tools=tools_of(SCHEMAS, strict=strict), seed=1, n=12, max_tokens=3000)["choices"]:
            if choice["finish_reason"] == "length":
                continue
            numbers.add(min(1, len(calls_of(choice, SCHEMAS))))
            content = choice["message"]["content"] or ""
            if form.begins_text:
                assert not content.lstrip().startswith(form.opening)
            else:
                assert form.opening.strip("[") not in content
    # Random tokens seldom spell an opening that is not a single token.
    assert numbers == ({0, 1} if form.opening in form.marks and name != "described" else {0})


def test_a_call_that_is_cut_off_does_not_end_with_tool_calls(service: Service) -> None:
    fields: dict[str, Any] = {"tools": TOOLS[:1], "tool_choice": "required", "seed": 4}
    if "enable_thinking" in str(service.get("/tokenizer_info").json().get("chat_template")):
        fields["chat_template_kwargs"] = {"enable_thinking": False}
    (whole,) = ask(service, **fields)["choices"]
    digits = service.post("/tokenize", prompt="0123456789", add_special_tokens=False).json()["tokens"]
    cuts: list[tuple[dict[str, Any], str]] = [
        ({"stop": ["days"]}, "stop"),
        ({"stop": ["weather"]}, "stop"),
        ({"stop_token_ids": digits}, "stop"),
        ({"max_tokens": 30}, "length"),
    ]
    for limits, reason in cuts:
        body = ask(service, **fields, **limits)
        (choice,) = body["choices"]
        assert choice["finish_reason"] == reason
        assert choice["stop_reason"] in limits.get("stop", limits.get("stop_token_ids", [None]))
        chunks = streamed(service, **fields, **limits)
        assert without_ids(joined(chunks)["choices"]) == without_ids([choice])
        for call, full in zip(choice["message"].get("tool_calls", ()), whole["message"]["tool_calls"], strict=False):
            cut = call["function"]["arguments"].rstrip("\ufffd")  # the end of a cut character
            assert full["function"]["arguments"].startswith(cut)


def test_a_conversation_with_calls_and_results_goes_on(service: Service) -> None:
    (first, *_) = ask(service, tools=TOOLS, tool_choice="required", seed=3)["choices"]
    calls = first["message"]["tool_calls"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "21 °C"} for call in calls]
    messages = [*MESSAGES, first["message"], *results]
    body = ask(service, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=20)
    assert "tool_calls" not in body["choices"][0]["message"]
    again = ask(service, messages=messages, tools=TOOLS, tool_choice="required", seed=3)
    assert calls_of(again["choices"][0], SCHEMAS)
    prompt = service.post(
        "/detokenize", tokens=service.post("/tokenize", messages=messages, tools=TOOLS).json()["tokens"]
    )
    assert prompt.json()["prompt"].count("21 °C") == len(calls)
