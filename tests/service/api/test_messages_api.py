"""Anthropic's Messages API: requests, messages, streams and errors, with a worker that returns a given text."""

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from service.api.app import Frontend
from service.config.settings import ServeSettings
from service.ipc.messages import FinishReason, Submit, decode_commands, encode_events
from service.ipc.shared_state import Lifecycle, Phase
from tests.service.echo import EchoChannel
from tests.service.message_events import joined_message, message_events
from tests.service.sequences import make_delta, make_finish
from tests.tiny_model import tiny_tokenizer

TEMPLATE = (
    "{% if tools %}{{ tools | map(attribute='function') | map(attribute='name') | join(',') }};{% endif %}"
    "{% for m in messages %}{{ m.role }}:"
    "{{ '(' ~ m.reasoning_content ~ ')' if m.reasoning_content }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }} {{ call.function.arguments | tojson }}>{% endfor %};"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    "{{ 'quiet' if enable_thinking is false }}"
)
HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "name": "weather",
    "description": "Get the weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "cache_control": {"type": "ephemeral"},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = "<think>Hm, é.</think>Yes."
KEY = "sk-alice-0123456789abcdef"


class ScriptedChannel(EchoChannel):
    """Channel to a fake worker that completes each prompt with `text`, three bytes in each token delta."""

    text = "Fine."
    reason = FinishReason.STOP
    stop: str | int | None = None
    num_cached_tokens = 0

    def submit(self, message: bytes) -> None:
        for command in decode_commands(message).commands:
            if not isinstance(command, Submit):
                continue
            self.submits.append(command)
            data = self.text.encode()
            pieces = [data[start : start + 3] for start in range(0, len(data), 3)]
            shown = [data[: 3 * end].decode(errors="ignore") for end in range(len(pieces) + 1)]
            events = [
                make_delta(command.uid, index=3 * n, ids=tuple(piece), text=shown[n + 1][len(shown[n]) :])
                for n, piece in enumerate(pieces)
            ]
            finish = make_finish(self.reason, stop_reason=self.stop, num_cached_tokens=self.num_cached_tokens)
            if self.failure is not None:
                finish = make_finish(FinishReason.ERROR, error=self.failure)
            events.append(make_delta(command.uid, index=len(data), finish=finish))
            for event in events if self.answers else []:
                self.frontend.receive(encode_events([event]))


@pytest.fixture
def queue() -> ScriptedChannel:
    return ScriptedChannel()


@pytest.fixture
def settings(tiny_checkpoint: Path, tmp_path: Path) -> ServeSettings:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    return ServeSettings(
        checkpoint=tiny_checkpoint,
        chat_template=str(tmp_path / "chat.jinja"),
        tool_format="hermes",
        reasoning_format="think",
        max_num_running=2,
        max_waiting_requests=2,
    )


def ask(client: TestClient, messages: Any = HELLO, **fields: Any) -> Any:
    return client.post("/v1/messages", json={"messages": messages, "max_tokens": 32, **fields})


def message(client: TestClient, messages: Any = HELLO, **fields: Any) -> dict[str, Any]:
    """Return the message of a request, and check that the joined stream of the same request is equal."""
    answer = ask(client, messages, **fields)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    streamed = ask(client, messages, stream=True, **fields)
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    same = joined_message(message_events(streamed.text))
    ids = [[block.pop("id") for block in whole["content"] if block["type"] == "tool_use"] for whole in (body, same)]
    assert len(ids[0]) == len(set(ids[0])) == len(ids[1])
    assert all(call_id.startswith("toolu_") for call_id in ids[0] + ids[1])
    assert {**same, "id": body["id"]} == body
    return body


def error(answer: Any, status: int, kind: str) -> str:
    """Check an error response in Anthropic's form, and return the error's message."""
    body = answer.json()
    assert (answer.status_code, body["type"], body["error"]["type"]) == (status, "error", kind), body
    assert set(body) == {"type", "error", "request_id"}
    assert body["request_id"] == answer.headers["x-request-id"] == answer.headers["request-id"]
    assert set(body["error"]) == {"type", "message", "details"}
    return str(body["error"]["message"])


def prompt_of(queue: EchoChannel) -> str:
    return tiny_tokenizer().decode(list(queue.submits[-1].prompt_token_ids))


def test_a_message_has_anthropics_fields(client: TestClient, queue: ScriptedChannel) -> None:
    queue.num_cached_tokens = 4
    body = message(client, system="Be brief.")
    assert body.pop("id").startswith("msg_")
    num_prompt_tokens = len(queue.submits[-1].prompt_token_ids)
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": body["model"],
        "content": [{"type": "text", "text": "Fine."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt_tokens - 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 5,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }


def test_the_events_of_a_stream_have_anthropics_order(client: TestClient, queue: ScriptedChannel) -> None:
    queue.text = THOUGHT
    events = message_events(ask(client, stream=True).text)
    kinds = [event["delta"]["type"] if event["type"] == "content_block_delta" else event["type"] for event in events]
    assert [kind for number, kind in enumerate(kinds) if kind != kinds[number - 1]] == [
        "message_start",
        *("content_block_start", "thinking_delta", "signature_delta", "content_block_stop"),
        *("content_block_start", "text_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    num_prompt_tokens = len(queue.submits[-1].prompt_token_ids)
    assert events[0]["message"]["usage"]["input_tokens"] == num_prompt_tokens
    assert events[0]["message"]["usage"]["output_tokens"] == 0


@pytest.mark.parametrize("text", ["", "é", "a longer text 😀 with four bytes"])
def test_a_stream_joins_to_the_same_text(client: TestClient, queue: ScriptedChannel, text: str) -> None:
    queue.text = text
    assert message(client)["content"] == [{"type": "text", "text": text}]


def test_the_stop_reason_says_how_a_message_ended(client: TestClient, queue: ScriptedChannel) -> None:
    queue.stop = "\n\n"
    body = message(client, stop_sequences=["\n\n"])
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "\n\n")
    assert queue.submits[-1].params.stop == ("\n\n",)
    queue.reason, queue.stop = FinishReason.LENGTH, None
    body = message(client)
    assert (body["stop_reason"], body["stop_sequence"]) == ("max_tokens", None)


def test_max_tokens_beyond_the_context_end_at_the_contexts_end(client: TestClient, queue: ScriptedChannel) -> None:
    queue.reason, queue.stop = FinishReason.LENGTH, None
    body = message(client, max_tokens=32_000)
    assert body["stop_reason"] == "model_context_window_exceeded"
    submit = queue.submits[-1]
    assert submit.params.max_tokens == 256 - len(submit.prompt_token_ids)
    told = error(ask(client, [{"role": "user", "content": "ab" * 300}]), 400, "invalid_request_error")
    assert "maximum context length is 256 tokens" in told


def test_thinking_becomes_a_block_before_the_text(client: TestClient, queue: ScriptedChannel) -> None:
    queue.text = THOUGHT
    thinking = {"type": "thinking", "thinking": "Hm, é.", "signature": ""}
    body = message(client)
    assert body["content"] == [thinking, {"type": "text", "text": "Yes."}]
    assert body["usage"]["output_tokens_details"] == {"thinking_tokens": len("<think>Hm, é.</think>".encode())}
    omitted = message(client, thinking={"type": "enabled", "display": "omitted"})
    assert omitted["content"] == [{"type": "text", "text": "Yes."}]


def test_thinking_can_be_switched_off(client: TestClient, queue: ScriptedChannel) -> None:
    for thinking, is_off in (({"type": "disabled"}, True), ({"type": "adaptive"}, False), (None, False)):
        ask(client, thinking=thinking)
        assert prompt_of(queue).endswith("quiet") is is_off


def test_a_thinking_budget_limits_the_reasoning(client: TestClient) -> None:
    """The tiny model's tokenizer has no token that ends the reasoning, so a limit cannot be enforced."""
    told = error(ask(client, thinking={"type": "enabled", "budget_tokens": 9}), 400, "invalid_request_error")
    assert told.startswith("thinking.budget_tokens: this output format cannot be enforced: the limit of reasoning")


def test_a_tool_call_becomes_a_tool_use_block(client: TestClient, queue: ScriptedChannel) -> None:
    queue.text = f"Let me look.{CALL}"
    body = message(client, tools=[WEATHER])
    assert body["stop_reason"] == "tool_use"
    assert body["content"] == [
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}},
    ]
    assert prompt_of(queue).startswith("weather;user:Hello;")
    assert queue.submits[-1].grammar is not None


def test_the_input_of_a_call_that_is_cut_off_is_empty(client: TestClient, queue: ScriptedChannel) -> None:
    queue.text, queue.reason, queue.stop = CALL[:50], FinishReason.LENGTH, None
    body = ask(client, tools=[WEATHER]).json()
    (block,) = body["content"]
    assert (block["name"], block["input"], body["stop_reason"]) == ("weather", {}, "max_tokens")
    events = message_events(ask(client, tools=[WEATHER], stream=True).text)
    pieces = [e["delta"]["partial_json"] for e in events if e.get("delta", {}).get("type") == "input_json_delta"]
    assert '{"city": "Oslo"}'.startswith("".join(pieces))


def test_calls_and_results_return_in_the_next_request(client: TestClient, queue: ScriptedChannel) -> None:
    queue.text = f"<think>Where?</think>{CALL}"
    first = ask(client, tools=[WEATHER]).json()
    call_id = first["content"][-1]["id"]
    result = {
        "type": "tool_result",
        "tool_use_id": call_id,
        "content": [{"type": "text", "text": "7 °C"}],
        "cache_control": {"type": "ephemeral"},
    }
    queue.text = "Cold."
    turns = [
        *HELLO,
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
        {"role": "user", "content": "Answer."},
    ]
    assert message(client, turns, tools=[WEATHER])["content"] == [{"type": "text", "text": "Cold."}]
    assert prompt_of(queue) == (
        'weather;user:Hello;assistant:(Where?)<weather {"city": "Oslo"}>;tool:7 °C;user:Well?\nAnswer.;assistant:'
    )
    for content, text in (("no net", "Error: no net"), (None, "Error: ")):
        turns[2]["content"] = [{**result, "content": content, "is_error": True}]
        assert ask(client, turns[:3], tools=[WEATHER]).status_code == 200
        assert f"tool:{text};assistant:" in prompt_of(queue)


def test_tool_choice_selects_the_tools(client: TestClient, queue: ScriptedChannel) -> None:
    clock = {**WEATHER, "name": "mcp__" + "clock" * 20}
    queue.text = CALL
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}, {"type": "auto"}):
        body = message(client, tools=[WEATHER, clock], tool_choice={**choice, "disable_parallel_tool_use": True})
        assert body["stop_reason"] == "tool_use"
    assert prompt_of(queue).startswith(f"weather,{clock['name']};")
    queue.text = "No."
    message(client, tools=[WEATHER], tool_choice={"type": "none"})
    assert prompt_of(queue).startswith("user:")


def test_a_last_assistant_message_is_continued(client: TestClient, queue: ScriptedChannel) -> None:
    turns = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "I am"}]}]
    assert message(client, turns)["content"] == [{"type": "text", "text": "Fine."}]
    assert prompt_of(queue) == "user:Hello;assistant:I am"


def test_system_texts_come_first_and_ignored_fields_are_named(client: TestClient, queue: ScriptedChannel) -> None:
    cached = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    answer = ask(client, system=[cached, {"type": "text", "text": "Rhyme."}], metadata={"user_id": "u"}, top_k=5)
    assert prompt_of(queue) == "system:Be brief.\nRhyme.;user:Hello;assistant:"
    assert set(answer.headers["x-ignored-fields"].split(",")) == {"metadata", "system[].cache_control"}
    assert queue.submits[-1].params.top_k == 5
    ask(client, [*HELLO, {"role": "system", "content": "Rhyme."}])
    assert prompt_of(queue) == "user:Hello;system:Rhyme.;assistant:"


def test_an_output_format_is_enforced(client: TestClient, queue: ScriptedChannel) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": wanted}}, {"output_format": wanted}):
        assert ask(client, **fields).status_code == 200
        assert queue.submits[-1].grammar is not None


def test_count_tokens_returns_the_length_of_the_prompt(client: TestClient, queue: ScriptedChannel) -> None:
    fields = {"messages": HELLO, "system": "Be brief.", "tools": [WEATHER]}
    counted = client.post("/v1/messages/count_tokens", json=fields)
    assert not queue.submits
    ask(client, **fields)
    assert counted.json() == {"input_tokens": len(queue.submits[-1].prompt_token_ids)}


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"max_tokens": None}, "max_tokens must be a whole number"),
        ({"max_tokens": 0}, "max_tokens must be greater than or equal to 1"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role must be 'system', 'user' or 'assistant'"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content must be a string, or a list of blocks"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]: image blocks"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "reads text only"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is required"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "a user message cannot have blocks"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "messages[0].content[0].tool_use_id names no tool_use block of an earlier message",
        ),
        (
            {
                "messages": [
                    *HELLO,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]},
                ]
            },
            "messages[1]: the last message calls a tool; add a user message with the tool_result",
        ),
        ({"system": [{"type": "image"}]}, "system[0]: image blocks"),
        ({"temperature": 3}, "temperature must be less than or equal to 2"),
        ({"stop_sequences": [""]}, "stop_sequences must not be empty"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type: 'bash_20250124' is not supported"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is required"),
        ({"tools": [{"name": "f" * 129, "input_schema": {}}]}, "tools[0].name must match pattern"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema must be a JSON Schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: any needs tools; add tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name is required"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice: the tool 'f' is not in tools"),
        ({"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name is not allowed with type auto"),
        ({"thinking": {"type": "on"}}, "thinking must be 'enabled', 'disabled' or 'adaptive'"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported by this server"),
        ({"stop_sequence": ["a"]}, "unknown field: stop_sequence; did you mean stop_sequences?"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"a": "b" * 256_000}}}},
            "output_config.format.schema has 256009 characters",
        ),
    ],
)
def test_invalid_requests_name_the_field(client: TestClient, fields: dict[str, Any], part: str) -> None:
    assert part in error(ask(client, **{"messages": HELLO, **fields}), 400, "invalid_request_error")


def test_a_thread_is_rejected_with_the_code_on_which_anthropics_sdk_sends_whole_conversations(
    client: TestClient,
) -> None:
    answer = ask(client, thread={"type": "create"})
    assert "thread is not supported" in error(answer, 400, "invalid_request_error")
    assert answer.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


def test_errors_have_anthropics_form(client: TestClient, settings: ServeSettings) -> None:
    error(ask(client, model="claude-sonnet-4-5"), 404, "not_found_error")
    assert "GET /v1/messages/batches" in error(client.get("/v1/messages/batches"), 404, "not_found_error")
    error(client.get("/v1/messages"), 405, "invalid_request_error")
    error(client.post("/v1/messages", content=b"{"), 400, "invalid_request_error")
    error(client.post("/v1/messages", content=b" " * (settings.max_body_size + 1)), 413, "request_too_large")
    error(client.post("/v1/messages/count_tokens", content=b"{}"), 400, "invalid_request_error")


def test_a_failure_of_the_engine_has_anthropics_form(client: TestClient, queue: ScriptedChannel) -> None:
    queue.text, queue.failure = "", "broken"
    error(ask(client), 500, "api_error")
    error(ask(client, stream=True), 500, "api_error")


def test_a_failure_in_a_stream_is_an_error_event(client: TestClient, queue: ScriptedChannel) -> None:
    queue.failure = "broken"
    answer = ask(client, stream=True)
    *begun, last = message_events(answer.text)
    assert begun[0]["type"] == "message_start"
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert last["request_id"] == answer.headers["x-request-id"]


def test_a_full_server_answers_with_anthropics_error_and_the_retry_headers(
    client: TestClient, queue: ScriptedChannel, frontend: Frontend
) -> None:
    frontend.context.admission.admit([1] * 4)
    answer = ask(client)
    error(answer, 429, "rate_limit_error")
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["x-should-retry"] == "true"


def test_a_draining_server_is_overloaded(client: TestClient, lifecycle: Lifecycle) -> None:
    lifecycle.enter(Phase.DRAINING)
    error(ask(client), 503, "overloaded_error")


class TestWithKeys:
    @pytest.fixture
    def settings(self, tiny_checkpoint: Path) -> ServeSettings:
        return ServeSettings.model_validate({"checkpoint": tiny_checkpoint, "api_keys": f"alice: {KEY}"})

    def test_a_key_is_accepted_in_either_header(self, client: TestClient) -> None:
        body = {"messages": HELLO, "max_tokens": 2}
        for path in ("/v1/messages", "/v1/chat/completions"):
            for headers in ({"x-api-key": KEY}, {"authorization": f"Bearer {KEY}"}):
                assert client.post(path, json=body, headers=headers).status_code == 200
            for headers in ({}, {"x-api-key": f"{KEY}x"}, {"authorization": "Bearer x", "x-api-key": KEY}):
                assert client.post(path, json=body, headers=headers).status_code == 401
        told = error(client.post("/v1/messages", json=body), 401, "authentication_error")
        assert "Authorization: Bearer KEY or x-api-key: KEY" in told
