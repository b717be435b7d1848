"""Anthropic's Messages API over HTTP: messages, streams, tool calls, counts and errors of a real server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.e2e.process import NO_TLS, PATIENCE_SECONDS, Service, serving
from tests.service.message_events import joined_message, message_events

pytestmark = pytest.mark.slow

PATH, KEY = "/v1/messages", "sk-alice-0123456789abcdef"
QUESTION = {"role": "user", "content": [{"type": "text", "text": "Where is the dog?"}]}
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["house", "garden"]}, "legs": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["place", "legs"],
    "additionalProperties": False,
}
TOOLS = [{"name": "look", "description": "Look around", "input_schema": SCHEMA}]
CHOICE = {"type": "any", "disable_parallel_tool_use": True}
EXACT: dict[str, Any] = {"max_tokens": 200, "temperature": 0, "system": "Be brief."}


@pytest.fixture(scope="module")
def service(long_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(long_checkpoint, tmp_path_factory.mktemp("messages"), KVASIR_API_KEYS=f"alice: {KEY}") as running:
        yield running


def send(service: Service, path: str = PATH, **fields: Any) -> httpx.Response:
    headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01", "anthropic-beta": "unknown-2026-01-01"}
    return httpx.post(service.url + path, json=fields, headers=headers, timeout=PATIENCE_SECONDS, verify=NO_TLS)


def message(service: Service, **fields: Any) -> dict[str, Any]:
    """Return the message of a request, and check that the joined stream of the same request is equal."""
    answer = send(service, **fields)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    same = joined_message(message_events(send(service, **fields, stream=True).text))
    for whole in (body, same):
        assert whole["usage"].pop("input_tokens") + whole["usage"].pop("cache_read_input_tokens") > 0
        for block in whole["content"]:
            block.pop("id", None)
    assert {**same, "id": body["id"]} == body
    return body


def test_a_stream_joins_to_the_message_of_the_same_request(service: Service) -> None:
    body = message(service, messages=[QUESTION], **EXACT)
    (block,) = body["content"]
    assert block["type"] == "text"
    assert block["text"]
    stop = block["text"][5:8]
    stopped = message(service, messages=[QUESTION], stop_sequences=[stop], **EXACT)
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", stop)
    assert stopped["content"][0]["text"] == block["text"][: block["text"].index(stop)]


def test_the_usage_and_the_count_are_the_tokens_of_the_prompt(service: Service) -> None:
    fields: dict[str, Any] = {"messages": [QUESTION], "system": "Be brief.", "tools": TOOLS}
    counted = send(service, f"{PATH}/count_tokens", **fields).json()
    usage = send(service, **fields, max_tokens=3, temperature=0).json()["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert usage["output_tokens"] == 3


def test_a_demanded_call_follows_the_schema_and_its_result_goes_back(service: Service) -> None:
    body = message(service, messages=[QUESTION], tools=TOOLS, tool_choice=CHOICE, **EXACT)
    calls = [block for block in body["content"] if block["type"] == "tool_use"]
    assert body["stop_reason"] == "tool_use"
    for call in calls:
        assert call["name"] == "look"
        jsonschema.validate(call["input"], SCHEMA)
    calls = [{**call, "id": f"toolu_{number}"} for number, call in enumerate(calls)]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "in the house"} for call in calls]
    turns = [QUESTION, {"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    after = message(service, messages=turns, tools=TOOLS, tool_choice={"type": "none"}, **EXACT)
    assert [block["type"] for block in after["content"]] == ["text"]


def test_errors_have_anthropics_form(service: Service) -> None:
    missing = httpx.post(service.url + PATH, json={}, timeout=PATIENCE_SECONDS, verify=NO_TLS)
    unknown = send(service, messages=[QUESTION], max_tokens=1, model="claude-sonnet-4-5")
    invalid = send(service, messages=[QUESTION])
    for answer, status, kind in (
        (missing, 401, "authentication_error"),
        (unknown, 404, "not_found_error"),
        (invalid, 400, "invalid_request_error"),
    ):
        body = answer.json()
        assert (answer.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
        assert body["request_id"] == answer.headers["request-id"]
    assert invalid.json()["error"]["message"] == "max_tokens is required"
