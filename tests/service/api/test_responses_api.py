"""`/v1/responses`: conversion of requests, output items, stream events, and the store of responses."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from service.api.app import Frontend
from service.config.settings import ServeSettings
from service.ipc.messages import FinishReason, encode_events
from service.protocol.errors import EngineFailed
from tests.service.response_events import ScriptedChannel, read_events, replay, without_ids
from tests.service.sequences import make_delta, make_finish
from tests.tiny_model import tiny_tokenizer

ROUTE = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Get the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
TEMPLATE = """\
{% for message in messages %}{{ message.role }}: {{ message.content }}
{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{% endfor %}{% endfor %}{% if tools %}{{ tools | length }} tools{% endif %}"""
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)
THINKS = {"reasoning_format": "think"}
SDK_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LOGPROBS = ["message.output_text.logprobs"]


@pytest.fixture
def options() -> dict[str, Any]:
    """Return settings. A test overrides this fixture by a parameter."""
    return {}


@pytest.fixture
def settings(tiny_checkpoint: Path, tmp_path: Path, options: dict[str, Any]) -> ServeSettings:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    given = {"chat_template": str(template), "max_num_running": 2, "max_waiting_requests": 2, **options}
    return ServeSettings(checkpoint=tiny_checkpoint, **given)


@pytest.fixture
def queue() -> ScriptedChannel:
    return ScriptedChannel()


def ask(client: TestClient, given: Any = "Hello.", **fields: Any) -> dict[str, Any]:
    """Return the response to a request. Checks that OpenAI's SDK can read it."""
    answer = client.post(ROUTE, json={"input": given, **fields})
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json())
    body: dict[str, Any] = answer.json()
    return body


def stream(client: TestClient, given: Any = "Hello.", **fields: Any) -> list[dict[str, Any]]:
    answer = client.post(ROUTE, json={"input": given, "stream": True, **fields})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = read_events(answer.text)
    for event in events:
        SDK_EVENT.validate_python(event)
    return events


def test_the_name_of_another_api_is_explained(client: TestClient) -> None:
    names = {
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }
    for name, meant in names.items():
        answer = client.post("/v1/responses", json={"input": "a", name: 3})
        assert problem(answer) == (name, f"unknown field: {name}; did you mean {meant}?")


def problem(answer: Any, status: int = 400) -> tuple[str, str]:
    """Return the field and the message of an error."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    return error["param"], error["message"]


def prompt_of(queue: ScriptedChannel) -> str:
    return tiny_tokenizer().decode(queue.submits[-1].prompt_token_ids)


def text_of(response: dict[str, Any]) -> str:
    (item,) = response["output"]
    return str(item["content"][0]["text"])


def advance(
    client: TestClient, frontend: Frontend, queue: ScriptedChannel, index: int, text: str, **delta: Any
) -> None:
    """Send a token delta of the last submitted sequence, in the thread of the event loop."""
    event = make_delta(queue.submits[-1].uid, index=index, ids=tuple(text.encode()), text=text, **delta)
    assert client.portal is not None
    client.portal.call(frontend.receive, encode_events([event]))


@pytest.mark.parametrize("width", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("options", "text", "kinds"),
    [
        ({}, "Hi there. \u2028 Grüße.", ["message"]),
        ({}, "", ["message"]),
        ({}, f"Let me look.\n{CALLS}", ["message", "function_call", "function_call"]),
        (THINKS, "<think>Is it?</think>\n\nIt is.", ["reasoning", "message"]),
        (THINKS, f"<think>Is it?</think>\n{CALLS}", ["reasoning", "function_call", "function_call"]),
        (THINKS, "<think>Is it? I do not", ["reasoning"]),
    ],
)
@pytest.mark.parametrize("include", [[], LOGPROBS])
def test_a_stream_joins_to_the_response_without_streaming(
    client: TestClient, queue: ScriptedChannel, text: str, kinds: list[str], width: int, include: list[str]
) -> None:
    queue.text, queue.width = text, width
    fields: dict[str, Any] = {"tools": [WEATHER], "include": include, "top_logprobs": 1 if include else None}
    whole = ask(client, **fields)
    streamed = replay(stream(client, **fields))
    assert [item["type"] for item in whole["output"]] == kinds
    assert without_ids(streamed["output"]) == without_ids(whole["output"])
    assert {item["status"] for item in whole["output"]} == {"completed"}
    own = ("id", "created_at", "completed_at", "output", "timings")
    assert {k: v for k, v in streamed.items() if k not in own} == {k: v for k, v in whole.items() if k not in own}
    logprobs = [
        each for item in whole["output"] if item["type"] == "message" for each in item["content"][0]["logprobs"]
    ]
    if include:
        shown = "".join(item["content"][0]["text"] for item in whole["output"] if item["type"] == "message")
        written = bytes(byte for each in logprobs for byte in each["bytes"]).decode()
        assert written.strip() == shown.strip()
        assert all(len(each["top_logprobs"]) == 1 for each in logprobs)
    else:
        assert logprobs == []


@pytest.mark.parametrize("options", [THINKS])
def test_usage_counts_cached_and_reasoning_tokens(client: TestClient, queue: ScriptedChannel) -> None:
    queue.text = "<think>Is it?</think>It is."
    usage = ask(client)["usage"]
    assert usage["output_tokens"] == len(queue.text)
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] == 2
    assert usage["output_tokens_details"] == {"reasoning_tokens": len("<think>Is it?</think>")}


def test_a_function_call_has_the_name_the_arguments_and_an_id_for_the_output(
    client: TestClient, queue: ScriptedChannel
) -> None:
    queue.text = CALLS
    response = ask(client, tools=[WEATHER], tool_choice={"type": "function", "name": "weather"})
    rome, oslo = response["output"]
    assert (rome["name"], json.loads(rome["arguments"])) == ("weather", {"city": "Rome"})
    assert rome["call_id"] != oslo["call_id"]
    assert rome["id"] != oslo["id"]
    assert response["tool_choice"] == {"type": "function", "name": "weather"}
    assert response["tools"][0]["parameters"] == WEATHER["parameters"]
    assert queue.submits[-1].grammar is not None
    answers = [{"type": "function_call_output", "call_id": call["call_id"], "output": "wet"} for call in (rome, oslo)]
    queue.text = "Wet in both."
    for fields in ({"previous_response_id": response["id"]}, {}):
        given = answers if fields else [{"role": "user", "content": "Hello."}, rome, oslo, *answers]
        assert text_of(ask(client, given, **fields)) == "Wet in both."
        assert prompt_of(queue).count("wet") == 2
        assert "Rome" in prompt_of(queue)


@pytest.mark.parametrize("streams", [False, True])
def test_a_response_cut_by_max_output_tokens_is_incomplete(
    client: TestClient, queue: ScriptedChannel, streams: bool
) -> None:
    queue.text, queue.reason = "Once", FinishReason.LENGTH
    response = replay(stream(client, max_output_tokens=4)) if streams else ask(client, max_output_tokens=4)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"
    assert response["max_output_tokens"] == 4
    assert queue.submits[-1].params.max_tokens == 4


def test_instructions_and_items_become_the_messages_of_the_chat_template(
    client: TestClient, queue: ScriptedChannel
) -> None:
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "3", "annotations": []}]},
        {"role": "developer", "content": "four"},
    ]
    ask(client, given, instructions="zero", temperature=0.5, seed=3, stop="x")
    words = ["zero", "one\ntwo", "3", "four"]
    places = [prompt_of(queue).index(word) for word in words]
    assert places == sorted(places)
    params = queue.submits[-1].params
    assert (params.temperature, params.stop) == (0.5, ("x",))


def test_a_response_repeats_the_fields_of_its_request(client: TestClient) -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    wanted = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    fields: dict[str, Any] = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "temperature": 0.5,
        "top_p": 0.9,
        "truncation": "auto",
        "max_output_tokens": 20,
        "max_tool_calls": 2,
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "p",
        "store": False,
        "text": {"format": wanted, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "service_tier": "default",
        "background": False,
    }
    response = ask(client, **fields)
    assert {name: response[name] for name in fields} == fields


def test_a_failure_within_a_stream_is_an_event_with_the_response(
    client: TestClient, frontend: Frontend, queue: ScriptedChannel
) -> None:
    queue.answers = False
    begun = client.post(ROUTE, json={"input": "a", "background": True}).json()
    advance(client, frontend, queue, 0, "On")
    assert client.portal is not None
    client.portal.call(frontend.context.engine_client.fail_all, EngineFailed("the engine died", retry=True))
    *_, last = read_events(client.get(f"{ROUTE}/{begun['id']}?stream=true").text)
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the engine died"}
    assert text_of(last["response"]) == "On"
    assert client.get(f"{ROUTE}/{begun['id']}").json() == last["response"]


def test_a_background_response_that_fails_before_its_first_event_is_stored_as_failed(
    client: TestClient, frontend: Frontend, queue: ScriptedChannel
) -> None:
    queue.answers = False
    begun = client.post(ROUTE, json={"input": "a", "background": True}).json()
    assert client.portal is not None
    client.portal.call(frontend.context.engine_client.fail_all, EngineFailed("the engine died", retry=True))
    ended = client.get(f"{ROUTE}/{begun['id']}").json()
    assert (ended["status"], ended["error"]["message"]) == ("failed", "the engine died")


def test_previous_response_id_continues_the_conversation_without_the_instructions(
    client: TestClient, queue: ScriptedChannel
) -> None:
    queue.text = "first answer"
    first = ask(client, "question one", instructions="secret rule")
    second = ask(client, "question two", previous_response_id=first["id"])
    third = ask(client, "question three", previous_response_id=second["id"])
    prompt = prompt_of(queue)
    assert "secret rule" not in prompt
    assert prompt.count("first answer") == 2
    places = [prompt.index(f"question {word}") for word in ("one", "two", "three")]
    assert places == sorted(places)
    assert third["previous_response_id"] == second["id"]
    listed = client.get(f"{ROUTE}/{third['id']}/input_items?order=asc").json()
    ResponseItemList.model_validate(listed)
    texts = [item["content"][0]["text"] for item in listed["data"]]
    assert texts == ["question one", "first answer", "question two", "first answer", "question three"]


def test_input_items_are_listed_in_pages(client: TestClient) -> None:
    response = ask(client, [{"role": "user", "content": str(number)} for number in range(5)])
    path = f"{ROUTE}/{response['id']}/input_items"
    first = client.get(f"{path}?limit=2").json()
    assert [item["content"][0]["text"] for item in first["data"]] == ["4", "3"]
    assert first["has_more"] is True
    rest = client.get(f"{path}?after={first['last_id']}").json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["2", "1", "0"]
    assert rest["has_more"] is False
    assert problem(client.get(f"{path}?limit=101"))[0] == "limit"
    assert problem(client.get(f"{path}?order=up"))[0] == "order"
    assert problem(client.get(f"{path}?after=x"))[0] == "after"


def test_a_stored_response_is_read_until_it_is_deleted(client: TestClient) -> None:
    for response in (ask(client), replay(stream(client))):
        path = f"{ROUTE}/{response['id']}"
        assert client.get(path).json() == response
        assert problem(client.get(f"{path}?stream=true"))[0] == "stream"
        assert problem(client.post(f"{path}/cancel"))[1].startswith("only a background response")
        assert client.delete(path).json() == {"id": response["id"], "object": "response", "deleted": True}
        for again in (client.get(path), client.delete(path), client.get(f"{path}/input_items")):
            assert "is not stored" in problem(again, 404)[1]
        answer = client.post(ROUTE, json={"input": "a", "previous_response_id": response["id"]})
        assert problem(answer, 404)[0] == "previous_response_id"


def test_a_response_with_store_false_is_not_stored(client: TestClient) -> None:
    response = ask(client, store=False)
    assert response["store"] is False
    problem(client.get(f"{ROUTE}/{response['id']}"), 404)
    answer = client.post(ROUTE, json={"input": "a", "previous_response_id": response["id"]})
    assert problem(answer, 404)[0] == "previous_response_id"


@pytest.mark.parametrize("options", [{"response_store_size": "40KiB"}])
def test_a_full_store_discards_the_oldest_responses(client: TestClient) -> None:
    ids = [ask(client, str(number))["id"] for number in range(12)]
    found = [client.get(f"{ROUTE}/{each}").status_code for each in ids]
    assert found == sorted(found, reverse=True)
    assert (found[0], found[-1]) == (404, 200)
    param, message = problem(client.post(ROUTE, json={"input": [{"role": "user", "content": "a" * 41_000}]}))
    assert (param, "send store: false" in message) == ("store", True)


@pytest.mark.parametrize("options", [{"response_store_size": "12KiB"}])
def test_a_store_full_of_running_responses_rejects_with_429(client: TestClient, queue: ScriptedChannel) -> None:
    queue.answers = False
    for _ in range(2):
        assert client.post(ROUTE, json={"input": "a", "background": True}).status_code == 200
    answer = client.post(ROUTE, json={"input": "a"})
    assert "running background responses" in problem(answer, 429)[1]
    assert answer.json()["error"]["code"] == "response_store_full"
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("options", [{"response_store_seconds": 1e-9}])
def test_a_stored_response_expires(client: TestClient, frontend: Frontend) -> None:
    response = ask(client)
    assert client.get(f"{ROUTE}/{response['id']}").status_code == 200
    frontend.responses.store.discard_expired()
    assert client.get(f"{ROUTE}/{response['id']}").status_code == 404


@pytest.mark.parametrize("options", [{"response_store_seconds": 0}])
def test_a_server_without_a_store_rejects_only_requests_that_need_it(client: TestClient) -> None:
    response = ask(client)
    assert response["store"] is False
    problem(client.get(f"{ROUTE}/{response['id']}"), 404)
    for name in ("store", "background"):
        assert problem(client.post(ROUTE, json={"input": "a", name: True}))[0] == name


@pytest.mark.parametrize("options", [{"api_keys": "ann: key-of-ann-0123456789, bob: key-of-bob-0123456789"}])
def test_an_api_key_reads_only_its_own_responses(client: TestClient, queue: ScriptedChannel) -> None:
    ann, bob = ({"authorization": f"Bearer key-of-{name}-0123456789"} for name in ("ann", "bob"))
    first = client.post(ROUTE, json={"input": "a"}, headers=ann).json()
    queue.answers = False
    running = client.post(ROUTE, json={"input": "a", "background": True}, headers=ann).json()
    for path in (f"{ROUTE}/{first['id']}", f"{ROUTE}/{running['id']}"):
        assert client.get(path, headers=bob).status_code == 404
        assert client.delete(path, headers=bob).status_code == 404
        assert client.get(f"{path}/input_items", headers=bob).status_code == 404
        assert client.post(f"{path}/cancel", headers=bob).status_code == 404
        assert client.get(path, headers=ann).status_code == 200
    answer = client.post(ROUTE, json={"input": "a", "previous_response_id": first["id"]}, headers=bob)
    assert answer.status_code == 404
    assert queue.cancelled == []


def test_a_background_response_goes_on_without_its_client(
    client: TestClient, frontend: Frontend, queue: ScriptedChannel
) -> None:
    queue.answers = False
    begun = ask(client, background=True)
    path = f"{ROUTE}/{begun['id']}"
    assert (begun["status"], begun["output"]) == ("queued", [])
    assert problem(client.post(ROUTE, json={"input": "a", "previous_response_id": begun["id"]}))[0] == (
        "previous_response_id"
    )
    advance(client, frontend, queue, 0, "On")
    running = client.get(path).json()
    Response.model_validate(running)
    assert (running["status"], text_of(running)) == ("in_progress", "On")
    advance(client, frontend, queue, 2, "ce", finish=make_finish(FinishReason.STOP))
    ended = client.get(path).json()
    assert (ended["status"], text_of(ended), ended["usage"]["output_tokens"]) == ("completed", "Once", 4)
    events = read_events(client.get(f"{path}?stream=true").text)
    assert replay(events) == ended
    later = read_events(client.get(f"{path}?stream=true&starting_after=3").text)
    assert later == events[4:]
    assert problem(client.get(f"{path}?stream=maybe"))[0] == "stream"
    for start in ("x", "-1", "99"):
        assert problem(client.get(f"{path}?stream=true&starting_after={start}"))[0] == "starting_after"


def test_a_background_response_can_be_streamed(client: TestClient) -> None:
    response = replay(stream(client, background=True))
    assert response["background"] is True
    assert client.get(f"{ROUTE}/{response['id']}").json() == response


@pytest.mark.parametrize("background", [False, True])
def test_a_retry_under_the_same_key_resumes_the_same_response(
    client: TestClient, queue: ScriptedChannel, background: bool
) -> None:
    body = {"input": "a", "stream": True, "background": background}
    first, again = (client.post(ROUTE, json=body, headers={"idempotency-key": "k"}) for _ in range(2))
    assert first.text == again.text
    assert len(queue.submits) == 1
    *_, before, _ = [line.removeprefix("id: ") for line in first.text.splitlines() if line.startswith("id: ")]
    resumed = client.post(ROUTE, json=body, headers={"last-event-id": before})
    assert read_events(resumed.text) == read_events(first.text)[-1:]


def test_a_cancelled_background_response_stops_in_the_engine(
    client: TestClient, frontend: Frontend, queue: ScriptedChannel
) -> None:
    queue.answers = False
    begun = ask(client, background=True)
    advance(client, frontend, queue, 0, "On")
    path = f"{ROUTE}/{begun['id']}"
    cancelled = client.post(f"{path}/cancel").json()
    Response.model_validate(cancelled)
    assert (cancelled["status"], text_of(cancelled)) == ("cancelled", "On")
    assert client.post(f"{path}/cancel").json() == client.get(path).json() == cancelled
    assert queue.cancelled == [queue.submits[-1].uid]
    queue.answers = True
    other = ask(client, background=True)
    assert client.post(f"{ROUTE}/{other['id']}/cancel").json()["status"] == "completed"


def test_a_deleted_background_response_stops_in_the_engine(client: TestClient, queue: ScriptedChannel) -> None:
    queue.answers = False
    begun = ask(client, background=True)
    assert client.delete(f"{ROUTE}/{begun['id']}").status_code == 200
    assert client.get(f"{ROUTE}/{begun['id']}").status_code == 404
    assert queue.cancelled == [queue.submits[-1].uid]


def test_truncation_auto_cuts_the_beginning_of_a_long_input(client: TestClient, queue: ScriptedChannel) -> None:
    long = "a" * 400 + "end"
    assert problem(client.post(ROUTE, json={"input": long}))[0] == "input"
    ask(client, long, truncation="auto", max_output_tokens=8)
    assert len(queue.submits[-1].prompt_token_ids) == 256 - 8
    assert "end" in prompt_of(queue)


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "input is required"),
        ({"input": None}, "input", "a string or a list"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": [5]}, "input[0]", "must be an object"),
        ({"input": [{"role": "user"}]}, "input[0].content", "is required"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "a string or a list"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "must be"),
        ({"input": [{"role": "user", "content": "a", "x": 1}]}, "input[0].x", "unknown field"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "'item_reference' is not supported"),
        ({"input": [{"type": "web_search_call"}]}, "input[0]", "'web_search_call' is not supported"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
            "'input_image' is not supported",
        ),
        ({"input": [{**CALL, "arguments": "["}]}, "input[0].arguments", "must be a JSON object"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id", "names no"),
        ({"input": "a" * 1000}, "input", "maximum context length"),
        ({"input": "a", "max_output_tokens": 256}, "max_output_tokens", "max_output_tokens is 256"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "must be"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0]", "'web_search' is not supported"),
        ({"input": "a", "tools": [{"type": "function"}]}, "tools[0].name", "is required"),
        ({"input": "a", "tools": [WEATHER, WEATHER]}, "tools", "two tools"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"input": "a", "tool_choice": {"type": "mcp"}}, "tool_choice", "must be"),
        ({"input": "a", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "not in tools"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.name", "is required"),
        (
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "x"}}}},
            "text.format.schema",
            "text.format.schema",
        ),
        ({"input": "a", "reasoning": {"effort": "huge"}}, "reasoning.effort", "must be"),
        ({"input": "a", "include": ["x"]}, "include[0]", "must be"),
        ({"input": "a", "metadata": {"a": 1}}, "metadata.a", "must be a string"),
        ({"input": "a", "conversation": "c"}, "conversation", "not supported"),
        ({"input": "a", "prompt": {"id": "p"}}, "prompt", "not supported"),
        ({"input": "a", "service_tier": "flex"}, "service_tier", "not supported"),
        ({"input": "a", "background": True, "store": False}, "background", "needs store"),
        ({"input": "a", "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "not"),
        ({"input": "a", "max_tokens": 5}, "max_tokens", "unknown field"),
        ({"input": "a", "messages": []}, "messages", "unknown field"),
    ],
)
def test_an_error_names_the_field_of_the_request(
    client: TestClient, queue: ScriptedChannel, body: dict[str, Any], param: str, message: str
) -> None:
    named, sentence = problem(client.post(ROUTE, json=body))
    assert named == param
    assert message in sentence
    assert queue.submits == []
