"""Fields of other servers' clients: the table of docs/api.md is what the server does, and covers OpenAI's SDK."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params
from starlette.testclient import TestClient

from service.protocol.chat import ChatCompletionRequest
from service.protocol.completions import CompletionRequest
from service.protocol.request_model import Ignored, RequestModel, Unsupported
from service.protocol.responses_request import ResponsesRequest
from service.protocol.tools import CalledFunction, ToolDefinition

PAGE = Path(__file__).parents[3] / "docs" / "api.md"
ROUTES: dict[str, tuple[str, type[RequestModel], dict[str, Any]]] = {
    "completions": ("/v1/completions", CompletionRequest, {"prompt": "a"}),
    "chat": ("/v1/chat/completions", ChatCompletionRequest, {"messages": [{"role": "user", "content": "a"}]}),
}
# A value that changes a response, or any value of an ignored field.
STRANGE = {"x": 1}


def rows() -> list[tuple[str, str, list[Any] | None]]:
    """Return the table's rows: a field, a route, and the accepted values; None: any value is ignored."""
    table = PAGE.read_text().partition("<!-- fields: ")[2].partition("<!-- end of fields -->")[0]
    found: list[tuple[str, str, list[Any] | None]] = []
    for line in table.splitlines():
        if not line.startswith("| `"):
            continue
        names, routes, treatment = (cell.strip() for cell in line.strip("|").split("|"))
        values = None if treatment == "ignored" else [json.loads(value) for value in re.findall("`(.*?)`", treatment)]
        found += [(name, route, values) for name in re.findall("`(.*?)`", names) for route in routes.split(", ")]
    return found


ROWS = rows()


@pytest.mark.parametrize("route", ROUTES)
def test_the_table_lists_all_ignored_and_unsupported_fields(route: str) -> None:
    _, model, _ = ROUTES[route]
    kinds = {name: [type(each) for each in field.metadata] for name, field in model.model_fields.items()}
    listed = {name: values is None for name, its_route, values in ROWS if its_route == route}
    declared = {name: Ignored in kind for name, kind in kinds.items() if Ignored in kind or Unsupported in kind}
    assert listed == declared


@pytest.mark.parametrize(
    ("model", "params"),
    [
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase),
        (ChatCompletionRequest, chat_params.CompletionCreateParamsBase),
        (ResponsesRequest, response_create_params.ResponseCreateParamsBase),
    ],
)
def test_every_parameter_of_openais_sdk_is_a_known_field(model: type[RequestModel], params: Any) -> None:
    assert set(params.__annotations__) <= set(model.model_fields)


def test_the_responses_api_names_ignored_fields_too(client: TestClient) -> None:
    body = {"input": "a", "max_output_tokens": 3, "prompt_cache_retention": "24h", "store": False}
    response = client.post("/v1/responses", json=body)
    assert (response.status_code, response.headers["x-ignored-fields"]) == (200, "prompt_cache_retention")


@pytest.mark.parametrize(("name", "route", "values"), ROWS)
def test_a_listed_field_is_treated_as_the_table_says(
    client: TestClient, name: str, route: str, values: list[Any] | None
) -> None:
    path, _, body = ROUTES[route]
    plain = client.post(path, json={**body, "seed": 1, "max_tokens": 3})
    text = plain.json()["choices"]
    for value in [STRANGE] if values is None else values:
        response = client.post(path, json={**body, "seed": 1, "max_tokens": 3, name: value})
        assert (response.status_code, response.json()["choices"]) == (200, text)
        assert response.headers.get("x-ignored-fields") == (name if values is None else None)
    if values is not None:
        response = client.post(path, json={**body, name: STRANGE})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)


def test_foreign_fields_in_messages_are_ignored_and_counted(client: TestClient) -> None:
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    call = {"id": "1", "extra_content": {}, "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}}}
    messages = [
        {"role": "user", "content": [part], "id": "1"},
        {"role": "assistant", "content": None, "annotations": [], "thinking_blocks": []},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "user", "content": "b", "id": "2"},
    ]
    response = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 3, "stream": True})
    assert response.status_code == 200
    called = {"tool_calls[].extra_content", "tool_calls[].function.parsed_arguments"}
    named = {"id", "content[].cache_control", "annotations", "thinking_blocks", *called}
    assert set(response.headers["x-ignored-fields"].split(",")) == {f"messages[].{name}" for name in named}
    metrics = client.get("/metrics").text
    assert 'llm_ignored_fields_total{engine="0",field="messages",model_name="tiny"} 1.0' in metrics


def test_foreign_fields_of_tools_are_ignored_and_not_shown_to_the_model(client: TestClient) -> None:
    plain = {"type": "function", "function": {"name": "f"}}
    foreign = {**plain, "cache_control": {}, "function": {"name": "f", "returns": "x"}}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [foreign], "truncate_prompt_tokens": -1}
    response = client.post("/v1/chat/completions", json={**body, "max_tokens": 1})
    assert response.status_code == 200, response.text
    names = set(response.headers["x-ignored-fields"].split(","))
    assert names == {"tools[].cache_control", "tools[].function.returns"}
    shown, wanted = (ToolDefinition.model_validate(tool).for_template() for tool in (foreign, plain))
    assert shown == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", {}),
        ('{"a": 1, "b": "x', {"a": 1, "b": "x"}),
        ('{"a": [1, ', {"a": [1]}),
        ("{", {}),
        ("[1]", None),
        ("no", None),
    ],
)
def test_arguments_of_a_call_that_ended_at_max_tokens_may_be_sent_back(
    text: str, wanted: dict[str, Any] | None
) -> None:
    assert CalledFunction(name="f", arguments=text).parsed_arguments() == wanted


def test_a_request_with_many_different_foreign_fields_is_rejected(client: TestClient) -> None:
    """Without this limit, each of a hundred thousand names would be compared with all known names."""
    message = {"role": "user", "content": "a", **{f"x{number}": 1 for number in range(33)}}
    response = client.post("/v1/chat/completions", json={"messages": [message]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages[0].x32")


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("guided_json", {"type": "integer"}, {"json": {"type": "integer"}}),
        ("guided_regex", "a+", {"regex": "a+"}),
        ("guided_choice", ["a", "b"], {"choice": ["a", "b"]}),
        ("guided_grammar", 'start: "a"', {"grammar": 'start: "a"'}),
    ],
)
def test_older_names_of_structured_outputs_mean_the_same(field: str, value: Any, wanted: dict[str, Any]) -> None:
    old = CompletionRequest.parse(json.dumps({"prompt": "a", field: value}).encode()).output_constraint
    new = CompletionRequest.parse(json.dumps({"prompt": "a", "structured_outputs": wanted}).encode()).output_constraint
    assert old is not None
    assert new is not None
    assert (old.kind, old.content, old.param) == (new.kind, new.content, field)
