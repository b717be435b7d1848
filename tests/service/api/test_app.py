"""Routes of the API process with an engine that responds at once."""

import asyncio
import json
import time
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from service.admission.controller import QueuePolicy
from service.api.app import Frontend
from service.ipc.messages import WorkerReady, encode_events
from service.ipc.shared_state import Lifecycle, Phase, WorkerState
from service.protocol.errors import QueueTimeout
from service.requests.engine_worker import STALL_SECONDS
from tests.service.bad_requests import BAD_REQUESTS
from tests.service.echo import EchoChannel
from tests.service.sequences import make_choice, make_hello, make_request


@pytest.mark.parametrize(("body", "status", "said"), BAD_REQUESTS, ids=range(len(BAD_REQUESTS)))
def test_a_bad_request_is_rejected_and_never_submitted_to_the_engine(
    client: TestClient, queue: EchoChannel, body: bytes, status: int, said: str
) -> None:
    response = client.post("/v1/completions", content=body)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert said in error["message"]
    assert len(error["message"]) < 300
    assert queue.submits == []


def test_a_completion_is_a_json_body_or_an_event_stream(client: TestClient) -> None:
    whole = client.post("/v1/completions", json={"prompt": "abc"}).json()
    assert whole["choices"][0]["text"] == "abc"
    assert whole["id"].startswith("cmpl-")
    streamed = client.post("/v1/completions", json={"prompt": "abc", "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.text.endswith("data: [DONE]\n\n")


def test_the_model_list_has_the_card_of_the_served_model(client: TestClient) -> None:
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 256)
    assert client.get("/v1/models/tiny").json() == card
    missing = client.get("/v1/models/other/one")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_detokenize_inverts_tokenize(client: TestClient) -> None:
    text = "once upon a 😀 <|endoftext|>"
    tokenized = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert tokenized["count"] == len(tokenized["tokens"]) == len(tokenized["token_strs"])
    assert tokenized["max_model_len"] == 256
    assert client.post("/detokenize", json={"tokens": tokenized["tokens"]}).json() == {"prompt": text}
    assert client.post("/tokenize", json={"prompt": text}).json()["token_strs"] is None
    assert client.post("/detokenize", json={"tokens": [274]}).status_code == 400
    assert client.post("/tokenize", json={"prompt": "a", "model": "x"}).status_code == 404
    assert client.post("/tokenize", json={"prompt": "a" * 100_000}).json()["count"] == 100_000


def test_tokenize_parses_special_tokens_unless_parse_special_is_false(client: TestClient) -> None:
    """lm-evaluation-harness reads a special token's text from /tokenizer_info and its id from /tokenize."""
    mark = client.get("/tokenizer_info").json()["eos_token"]

    def tokens(text: str, **fields: bool) -> list[int]:
        answer: list[int] = client.post("/tokenize", json={"prompt": text, **fields}).json()["tokens"]
        return answer

    for fields in ({}, {"add_special_tokens": False}, {"parse_special": True}):
        assert tokens(mark, **fields) == [273]
        assert tokens(f"a{mark}b", **fields) == [97, 273, 98]
        assert tokens(f"a{mark}", parse_special=False, add_special_tokens=False) == [97, *mark.encode()]
    response = client.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}], "parse_special": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "parse_special")


def test_neutral_fields_of_vllm_clients_change_nothing(client: TestClient) -> None:
    messages = [{"role": "user", "content": "hi"}]
    plain = client.post("/tokenize", json={"messages": messages}).json()
    more: dict[str, Any] = {
        "continue_final_message": False,
        "chat_template": None,
        "tools": [],
        "return_token_strs": None,
    }
    assert client.post("/tokenize", json={"messages": messages, **more}).json() == plain
    for name, value, param in (("chat_template", "x", "chat_template"), ("tools", [{}], "tools[0].type")):
        response = client.post("/tokenize", json={"messages": messages, name: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_the_health_version_metrics_and_playground_routes_respond(client: TestClient) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    assert client.head("/health").status_code == 200
    assert client.get("/version").json()["version"]
    assert client.get("/server_info").json()["served_model_name"] == client.get("/v1/models").json()["data"][0]["id"]
    assert "llm_request_success_total" in client.get("/metrics").text
    assert client.get("/").content == client.get("/playground").content
    assert client.get("/").headers["content-type"].startswith("text/html")


def test_a_draining_server_rejects_with_503_and_closes_the_connection(client: TestClient, lifecycle: Lifecycle) -> None:
    lifecycle.enter(Phase.DRAINING)
    response = client.post("/v1/completions", json={"prompt": "a"})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "draining"
    assert response.headers["connection"] == "close"
    assert 1 <= int(response.headers["retry-after"]) <= 30
    assert client.get("/health").status_code == 200, "the process is alive while it drains"


def say(frontend: Frontend, hello: WorkerReady) -> None:
    frontend.receive(encode_events([hello]))


def test_readiness_depends_on_the_worker_and_the_phase(
    client: TestClient,
    frontend: Frontend,
    lifecycle: Lifecycle,
    worker_state: WorkerState,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ready() -> tuple[int, str]:
        response = client.get("/ready")
        assert (response.status_code == 503) == ("retry-after" in response.headers)
        return response.status_code, response.json()["state"]

    assert ready() == (503, "loading")
    say(frontend, msgspec.structs.replace(make_hello(0), startup_seconds=3600.0))
    assert ready() == (200, "ready")
    worker_state.epoch.value, worker_state.epoch_seconds.value = 1, time.monotonic()
    assert ready() == (503, "loading")
    assert 3000 < client.get("/ready").json()["eta_s"] <= 3600, "the last start took an hour"
    say(frontend, make_hello(1))
    assert ready() == (200, "ready")
    monkeypatch.setattr(frontend.context.workers[0].watchdog, "silence", lambda: STALL_SECONDS + 1.0)
    assert ready() == (503, "stalled")
    monkeypatch.setattr(frontend.context.workers[0].watchdog, "silence", lambda: 0.0)
    assert ready() == (200, "ready")
    monkeypatch.setattr(frontend.context.workers[0].watchdog, "silence", lambda: STALL_SECONDS + 1.0)
    lifecycle.enter(Phase.DRAINING)
    assert ready() == (503, "draining")


def test_ready_reports_the_kernels_of_the_running_worker(
    client: TestClient, frontend: Frontend, worker_state: WorkerState
) -> None:
    def reported() -> tuple[object, ...]:
        readiness = client.get("/ready").json()
        return tuple(readiness[field] for field in ("level", "attention", "dtype"))

    assert reported() == (None, None, None)
    say(frontend, make_hello(0))
    assert reported() == ("avx2", "native", "float32")
    worker_state.epoch.value = 1
    assert reported() == (None, None, None), "the next worker may use other kernels"


def test_an_invalid_worker_message_fails_requests_but_not_the_api_process(
    frontend: Frontend, queue: EchoChannel, caplog: pytest.LogCaptureFixture
) -> None:
    queue.answers = False
    request = make_request(make_choice("a"))
    frontend.context.engine_client.submit(request)
    frontend.receive(b"\xc1")
    assert request.failure is not None
    assert request.failure.status == 500


def test_a_content_length_that_is_not_a_number_is_rejected(client: TestClient) -> None:
    response = client.post("/v1/completions", content=b"{}", headers={"content-length": "many"})
    assert response.status_code == 400


def test_every_response_has_the_request_id(client: TestClient) -> None:
    for body in ({"prompt": "a"}, {"prompt": ""}):
        response = client.post("/v1/completions", content=json.dumps(body), headers={"x-request-id": "mine"})
        assert response.headers["x-request-id"] == "mine"


def test_the_engine_state_metric_ignores_jumps_of_the_wall_clock(
    client: TestClient,
    frontend: Frontend,
    lifecycle: Lifecycle,
    worker_state: WorkerState,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gauge for several processes would show the value with the latest wall-clock time, which may jump back."""
    seconds = iter(range(2_000_000_000, 0, -1_000_000))
    monkeypatch.setattr(time, "time", lambda: float(next(seconds)))

    def state() -> list[str]:
        lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith("llm_engine_state{")]
        return [line.partition('state="')[2].partition('"')[0] for line in lines if line.endswith(" 1.0")]

    assert state() == ["starting"]
    say(frontend, make_hello(0))
    assert state() == ["ready"]
    worker_state.epoch.value, worker_state.epoch_seconds.value = 1, time.monotonic()
    assert state() == ["restarting"]
    say(frontend, make_hello(1))
    assert state() == ["ready"]
    monkeypatch.setattr(frontend.context.workers[0].watchdog, "silence", lambda: STALL_SECONDS + 1.0)
    assert state() == ["stalled"]
    lifecycle.enter(Phase.DRAINING)
    assert state() == ["draining"]


def test_periodic_work_expires_requests_that_wait_too_long(
    frontend: Frontend, queue: EchoChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API process fails the request alone: the worker, which may hang, sends nothing."""
    queue.answers = False
    monkeypatch.setattr("service.api.app._TICK_SECONDS", 0.0)
    say(frontend, make_hello(0))
    request = make_request(make_choice("a"))
    request.arrival_seconds, request.terms = time.monotonic() - 6.0, QueuePolicy(timeout_seconds=5.0)
    frontend.context.engine_client.submit(request)

    async def run() -> None:
        tending = asyncio.create_task(frontend.run_periodic_work())
        while not request.has_failed:
            await asyncio.sleep(0)
        tending.cancel()

    asyncio.run(run())
    assert isinstance(request.failure, QueueTimeout)


def test_periodic_work_records_heartbeats(frontend: Frontend, lifecycle: Lifecycle) -> None:
    async def run() -> None:
        tending = asyncio.create_task(frontend.run_periodic_work())
        await asyncio.sleep(0)
        tending.cancel()

    assert lifecycle.num_api_beats.value == 0
    for _ in range(2):
        asyncio.run(run())
    assert lifecycle.num_api_beats.value == 2


def test_commands_for_a_dead_worker_go_to_the_next_worker(
    frontend: Frontend, queue: EchoChannel, worker_state: WorkerState
) -> None:
    queue.answers = False
    frontend.context.engine_client.submit(make_request(make_choice("before")))
    worker_state.epoch.value = 1  # the main process has seen the worker's death and starts another
    frontend.context.engine_client.submit(make_request(make_choice("between")))
    assert [submit.uid for submit in queue.submits] == ["before"]
    frontend.receive(encode_events([make_hello(1)]))
    assert [submit.uid for submit in queue.submits[1:]] == ["before", "between"]
    assert queue.epochs == [0, 1]


def test_a_failing_metric_does_not_block_a_new_worker(
    frontend: Frontend, queue: EchoChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.metrics.recorder.Metrics.observe_worker_start", None)
    frontend.receive(encode_events([make_hello(1)]))
    frontend.context.engine_client.submit(make_request(make_choice("after")))
    assert queue.epochs == [1]
