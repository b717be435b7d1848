"""Requests of every kind: their bodies, the check of their answers, and the requests that follow them."""

import itertools
import json
import time
from typing import Any

import pytest

from loadtest.client.outcome import ClientKind, Ending, Outcome
from loadtest.client.requests import (
    ConversationRequest,
    EmbeddingLoadRequest,
    FollowUp,
    LaterTurn,
    LoadRequest,
    StructuredRequest,
    ToolRequest,
)
from loadtest.client.sse_client import CompletionReader
from loadtest.client.workload import Turns

USAGE = {"prompt_tokens": 9, "completion_tokens": 3}
VISIT = '{"city": "Kassel", "days": 3, "guests": ["adult"], "is_booked": false}'
TOOLS = ToolRequest(index=1, prompt=["Sun?"], max_tokens=40, answer_tokens=7, tool_seconds=0.5, ignore_eos=False)


def answer(request: LoadRequest, *messages: dict[str, Any], usage: Any = USAGE) -> Outcome:
    """Return the outcome of a request whose response streams these messages in one read."""
    choices: list[dict[str, Any]] = [{"index": 0, "delta": each, "finish_reason": None} for each in messages]
    choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    events = [{"choices": [choice]} for choice in choices] + [{"choices": [], "usage": usage}]
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    reader = CompletionReader(request)
    reader.feed(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", 1.0)
    for moment, line in enumerate([*lines, "data: [DONE]\n\n"], 2):
        reader.feed(line.encode(), float(moment))
    reader.end_of_connection(99.0)
    return reader.finish()


def whole(request: LoadRequest, body: dict[str, Any]) -> Outcome:
    content = json.dumps(body).encode()
    reader = CompletionReader(request)
    reader.feed(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content), 1.0)
    return reader.finish()


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        (VISIT, ""),
        (VISIT[:-9], "Input data was truncated"),
        (VISIT.replace("3", "15"), "$.days"),
        (VISIT.replace("Kassel", "Paris"), "$.city"),
        ("Gladly: " + VISIT, "malformed"),
        ("", "Input data was truncated"),
    ],
)
def test_structured_output_is_parsed_and_a_broken_answer_is_a_failure(text: str, flaw: str) -> None:
    request = StructuredRequest(index=0, prompt=["Plan"], max_tokens=9)
    body = request.body("m")
    schema = body["response_format"]["json_schema"]["schema"]
    assert (schema["additionalProperties"], set(schema["required"])) == (False, set(schema["properties"]))
    assert "$ref" not in json.dumps(schema)
    assert body["messages"] == [{"role": "user", "content": "Plan"}]
    outcome = answer(request, {"role": "assistant", "content": ""}, {"content": text[:9]}, {"content": text[9:]})
    assert outcome.ending is (Ending.INVALID if flaw else Ending.OK)
    assert flaw in outcome.detail


def test_a_tool_loop_is_a_call_its_result_and_an_answer() -> None:
    body = TOOLS.body("m")
    assert (body["tool_choice"], body["tools"][0]["function"]["name"]) == ("required", "get_weather")
    first = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "get_weather", "arguments": ""}}
    parts = ['{"city": "Han', 'au", "days": 2}']
    later = [{"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in parts]
    outcome = answer(TOOLS, {"role": "assistant", "content": None, "tool_calls": [first]}, *later)
    assert (outcome.ending, outcome.detail) == (Ending.OK, "")
    assert len(outcome.chunk_seconds) == 3, "parts of a call are tokens"
    follow_up = TOOLS.follow_up(outcome)
    assert follow_up is not None
    pause, result = follow_up
    assert (pause, result.max_tokens) == (0.5, 7)
    said = result.body("m")
    assert said["tool_choice"] == "none"
    assert [message["role"] for message in said["messages"]] == ["user", "assistant", "tool"]
    assert said["messages"][1]["tool_calls"][0]["function"]["arguments"] == "".join(parts)
    assert said["messages"][2]["tool_call_id"] == "call-1"
    end = answer(result, {"content": "Sunny."})
    assert (end.ending, result.follow_up(end)) == (Ending.OK, None)


@pytest.mark.parametrize(
    ("function", "flaw"),
    [
        (None, "no tool call"),
        ({"name": "get_time", "arguments": '{"city": "Hanau", "days": 2}'}, "unknown tool 'get_time'"),
        ({"name": "get_weather", "arguments": '{"city": "Hanau"}'}, "missing required field `days`"),
    ],
)
def test_a_wrong_tool_call_is_a_failure(function: dict[str, str] | None, flaw: str) -> None:
    calls = [] if function is None else [{"id": "a", "type": "function", "function": function}]
    choice = {"index": 0, "message": {"content": "", "tool_calls": calls}, "finish_reason": "tool_calls"}
    outcome = whole(TOOLS, {"choices": [choice], "usage": USAGE})
    assert outcome.ending is Ending.INVALID
    assert flaw in outcome.detail


def test_an_embedding_has_a_vector_and_no_choice() -> None:
    request = EmbeddingLoadRequest(index=0, prompt="Once", max_tokens=0, client=ClientKind.WHOLE)
    assert request.body("m") == {"model": "m", "input": "Once"}
    usage = {"prompt_tokens": 4, "total_tokens": 4}
    outcome = whole(request, {"data": [{"index": 0, "embedding": [0.5, 0.1]}], "usage": usage})
    assert (outcome.ending, outcome.prompt_tokens, outcome.completion_tokens) == (Ending.OK, 4, 0)
    assert whole(request, {"data": [], "usage": usage}).ending is Ending.INVALID


def test_thoughts_of_a_reasoning_model_are_tokens_but_no_answer() -> None:
    request = ConversationRequest(index=0, prompt=["Why?"], max_tokens=9)
    outcome = answer(request, {"reasoning_content": "Hm"}, {"content": "So"})
    assert (outcome.text, len(outcome.chunk_seconds)) == ("So", 2)


def test_a_conversation_repeats_the_answers_of_the_server() -> None:
    turns = [LaterTurn("And then?", 5, 0.25), LaterTurn("The end?", 6, 0.0)]
    request = ConversationRequest(index=0, prompt=["Once"], max_tokens=4, later=turns)
    second = request.follow_up(answer(request, {"content": "upon"}))
    assert second is not None
    assert second.pause_seconds == 0.25
    assert (second.request.prompt, second.request.max_tokens) == (["Once", "upon", "And then?"], 5)
    third = second.request.follow_up(answer(second.request, {"content": "a time"}))
    assert third is not None
    roles = [message["role"] for message in third.request.body(None)["messages"]]
    assert roles == ["user", "assistant"] * 2 + ["user"]
    assert third.request.follow_up(answer(third.request, {"content": "Yes"})) is None


def test_a_follow_up_goes_before_a_new_request_once_it_is_due() -> None:
    later = [LaterTurn("now", 5, 0.0), LaterTurn("much later", 5, 3600.0)]
    new = (ConversationRequest(index=i, prompt=[str(i)], max_tokens=4, later=later) for i in range(3))
    turns = Turns(new)

    def end(request: LoadRequest, ending: Ending = Ending.OK) -> None:
        assert request.on_end is not None
        outcome = answer(request, {"content": "yes"})
        outcome.ending, outcome.end_seconds = ending, time.perf_counter()
        request.on_end(request, outcome)

    first, second = next(turns), next(turns)
    end(first)
    due = next(turns)
    assert due.prompt == ["0", "yes", "now"]
    end(due)  # its follow-up is due in an hour
    end(second, Ending.SHED)  # a conversation ends with a failure
    third = next(turns)
    assert third.prompt == ["2"]
    last = list(turns)
    assert [request.prompt[-1] for request in last] == ["much later"], "not left out when new requests have ended"
    assert [each.index for each in (first, second, due, third, *last)] == [0, 1, 0, 2, 0]


def test_the_follow_up_of_a_plain_request_is_nothing() -> None:
    request = LoadRequest(index=0, prompt="Once", max_tokens=4)
    follow_ups: list[FollowUp | None] = [request.follow_up(answer(request, {"content": "x"}))]
    assert follow_ups == [None]
    assert list(itertools.islice(Turns(iter([request])), 5)) == [request]
