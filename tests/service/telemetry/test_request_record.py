"""Record and log line of a request at its end: exactly one, from wherever the request ends."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from service.admission.controller import QueuePolicy
from service.api.app import Frontend
from service.config.log_setup import JsonFormatter
from service.config.settings import ServeSettings
from service.ipc.messages import Submit, decode_commands, encode_events
from service.protocol.errors import ApiError, Draining
from service.telemetry.request_record import Observe, RequestLog, RequestRecord, rejection
from tests.service.echo import EchoChannel
from tests.service.sequences import make_delta

KEY = "sk-alice-0123456789abcdef"
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def settings(tiny_checkpoint: Path) -> ServeSettings:
    return ServeSettings.model_validate(
        {
            "checkpoint": tiny_checkpoint,
            "max_num_running": 2,
            "max_waiting_requests": 2,
            "max_body_size": "1KiB",
            "api_keys": f"alice: {KEY}",
        }
    )


@pytest.fixture
def records() -> list[RequestRecord]:
    return []


@pytest.fixture
def observers(records: list[RequestRecord]) -> list[Observe]:
    return [records.append, RequestLog("tiny").write]


@pytest.fixture
def asking(client: TestClient) -> TestClient:
    """Return the client with an API key."""
    client.headers["authorization"] = f"Bearer {KEY}"
    return client


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[dict[str, Any]]]:
    """Return a function that returns the JSON lines of the request log so far."""
    caplog.set_level(logging.INFO, "kvasir.request")
    monkeypatch.setattr(logging.getLogger("kvasir"), "propagate", True)
    return lambda: [json.loads(JsonFormatter().format(r)) for r in caplog.records if r.name == "kvasir.request"]


def test_a_completion_has_one_line_with_tokens_and_times(
    asking: TestClient, lines: Callable[[], list[dict[str, Any]]]
) -> None:
    body = asking.post(TEXT, json={"prompt": ["abc", "de"], "n": 2}, headers={"x-request-id": "mine"}).json()
    (line,) = lines()
    assert line["message"] == "POST /v1/completions: 200"
    assert (line["request_id"], line["key"], line["method"]) == ("mine", "alice", "POST")
    assert (line["path"], line["route"], line["status"], line["client_gone"]) == (TEXT, TEXT, 200, False)
    assert (line["model"], line["response_id"], line["stream"]) == ("tiny", body["id"], False)
    assert (line["num_choices"], line["finish_reasons"]) == (4, ["length"] * 4)
    usage = body["usage"]
    assert (line["num_prompt_tokens"], line["num_completion_tokens"]) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert (line["num_cached_tokens"], line["num_worker_restarts"]) == (0, 0)
    times = body["timings"]
    for name in ("queue", "prefill", "ttft", "decode"):
        assert line[f"{name}_seconds"] == pytest.approx(times[f"{name}_ms"] / 1000, abs=1e-5)
    assert line["total_seconds"] >= line["ttft_seconds"]
    assert "error" not in line
    assert KEY not in json.dumps(line)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": "abc", "stream": True, "model": "tiny"}),
        (CHAT, {"messages": [{"role": "user", "content": "abc"}], "stream": True}),
    ],
)
def test_a_stream_has_one_line(asking: TestClient, records: list[RequestRecord], path: str, body: Any) -> None:
    events = asking.post(path, json={**body, "stream_options": {"include_usage": True}}).text.split("\n\n")
    usage = json.loads(events[-3].removeprefix("data: "))["usage"]
    (record,) = records
    assert record.generation is not None
    assert (record.status, record.is_client_gone, record.error) == (200, False, None)
    assert record.generation.is_stream
    assert record.generation.num_completion_tokens == usage["completion_tokens"]
    assert record.generation.num_prompt_tokens == usage["prompt_tokens"]


def test_an_embedding_has_the_tokens_of_all_groups(asking: TestClient, records: list[RequestRecord]) -> None:
    usage = asking.post("/v1/embeddings", json={"input": ["abc", "de", "fgh"]}).json()["usage"]
    (record,) = records
    assert record.generation is not None
    assert len(record.generation.choices) == 3
    assert (record.generation.num_prompt_tokens, record.generation.num_completion_tokens) == (usage["prompt_tokens"], 0)


@pytest.mark.parametrize(
    ("path", "content", "status", "error"),
    [
        (TEXT, b'{"prompt": 3}', 400, "invalid_request"),
        (TEXT, b"[" * 2000, 413, "body_too_large"),
        (TEXT, b'{"prompt": "a", "model": "x\\n\\u2028"}', 404, "model_not_found"),
        ("/v1/nope", b"{}", 404, "route_not_found"),
        ("/version", b"{}", 405, "method_not_allowed"),
    ],
)
def test_a_rejection_by_a_route_has_one_line(
    asking: TestClient, records: list[RequestRecord], path: str, content: bytes, status: int, error: str
) -> None:
    assert asking.post(path, content=content).status_code == status
    (record,) = records
    assert (record.status, record.error, record.is_client_gone) == (status, error, False)
    assert (record.key, record.generation) == ("alice", None)


def test_a_request_without_a_key_has_one_line(client: TestClient, records: list[RequestRecord]) -> None:
    assert client.post(TEXT, json={"prompt": "a"}, headers={"authorization": "Bearer no"}).status_code == 401
    (record,) = records
    assert (record.status, record.error, record.key, record.route) == (401, "invalid_api_key", None, None)
    assert (record.request_id or "").startswith("req-")


def test_a_request_to_a_full_server_has_one_line(
    asking: TestClient, frontend: Frontend, records: list[RequestRecord]
) -> None:
    frontend.context.admission.admit([1, 1, 1, 1], QueuePolicy(tenant="alice"))
    assert asking.post(TEXT, json={"prompt": "a"}).status_code == 429
    assert asking.post(TEXT, json={"prompt": "a", "timeout": 5}).status_code == 429
    assert [(record.status, record.error) for record in records] == [(429, "queue_full")] * 2
    assert [record.route for record in records] == [None, TEXT]  # rejected by middleware, and by the route


def test_a_bug_has_one_line(
    asking: TestClient, frontend: Frontend, records: list[RequestRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontend.context, "processor", None)
    assert asking.post(TEXT, json={"prompt": "a"}).status_code == 500
    (record,) = records
    assert (record.status, record.error, record.is_client_gone) == (500, "internal_error", False)


def test_an_error_within_a_stream_is_the_error_of_its_line(
    asking: TestClient,
    frontend: Frontend,
    queue: EchoChannel,
    records: list[RequestRecord],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def begin_and_fail(message: bytes) -> None:
        for command in decode_commands(message).commands:
            if isinstance(command, Submit):
                frontend.receive(encode_events([make_delta(command.uid, ids=(97,), text="a")]))
                frontend.context.engine_client.fail_all(Draining("over", retry_after_seconds=1.0))

    monkeypatch.setattr(queue, "submit", begin_and_fail)
    assert '"code":"draining"' in asking.post(TEXT, json={"prompt": "a", "stream": True}).text
    (record,) = records
    assert record.generation is not None
    assert (record.status, record.error, record.is_client_gone) == (200, "draining", False)
    assert (record.generation.finish_reasons, record.generation.num_completion_tokens) == ([None], 1)


def test_a_failed_computation_is_the_error_of_its_line(
    asking: TestClient, queue: EchoChannel, records: list[RequestRecord]
) -> None:
    queue.failure = "out of order"
    assert asking.post(TEXT, json={"prompt": "a"}).status_code == 500
    (record,) = records
    assert record.generation is not None
    assert (record.error, record.generation.finish_reasons) == ("engine_failed", ["error"])


def test_a_retry_with_an_idempotency_key_is_a_replay_without_tokens(
    asking: TestClient, records: list[RequestRecord]
) -> None:
    for _ in range(2):
        assert asking.post(TEXT, json={"prompt": "abc"}, headers={"idempotency-key": "one"}).status_code == 200
    first, again = records
    assert first.generation is not None
    assert (first.is_replay, first.generation.num_completion_tokens) == (False, 3)
    assert (again.is_replay, again.generation, again.is_client_gone) == (True, None, False)


def test_a_line_of_hostile_text_is_valid_json(
    asking: TestClient, lines: Callable[[], list[dict[str, Any]]], records: list[RequestRecord]
) -> None:
    hostile = '/v1/"\\%0a%e2%80%a8é%ff' + "x" * 1000
    headers = [(b"x-request-id", b'"\xe9, "level": "FATAL"'), (b"traceparent", b"00-\xff")]
    assert asking.get(hostile, headers=headers).status_code == 404
    (line,) = lines()
    assert line["path"].startswith('/v1/"\\\n\u2028é')
    assert len(line["path"]) == 200
    assert line["request_id"].startswith("req-")


def test_probes_have_lines_at_level_debug_only(
    asking: TestClient, lines: Callable[[], list[dict[str, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    asking.get("/health")
    asking.get("/ready")
    assert lines() == []
    caplog.set_level(logging.DEBUG, "kvasir.request")
    asking.get("/health")
    assert [(line["level"], line["path"]) for line in lines()] == [("DEBUG", "/health")]


@pytest.mark.parametrize("is_logged", [False, True])
def test_prompts_are_logged_only_on_request(
    asking: TestClient,
    frontend: Frontend,
    records: list[RequestRecord],
    lines: Callable[[], list[dict[str, Any]]],
    is_logged: bool,
) -> None:
    asking.post(TEXT, json={"prompt": ["secret", "other"], "n": 2})
    (record,) = records
    (before,) = lines()
    RequestLog("tiny", frontend.context.served.tokenizer.decode if is_logged else None).write(record)
    line = lines()[1]
    assert "secret" not in json.dumps(before)
    assert line.get("prompts") == (["secret", "other"] if is_logged else None)
    assert line.get("completions") == (["secret", "secret", "other", "other"] if is_logged else None)


def test_a_request_that_was_no_valid_http_has_a_line(lines: Callable[[], list[dict[str, Any]]]) -> None:
    RequestLog("tiny").write(rejection(ApiError("broken")))
    (line,) = lines()
    assert (line["message"], line["status"], line["error"]) == ("incomplete request: 500", 500, "internal_error")
