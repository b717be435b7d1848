"""Queue timeouts of requests, from the HTTP request to the engine and back."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from service.admission.controller import QueuePolicy
from service.api.app import Frontend
from service.api.openapi import openapi_document
from service.http.request_io import TIMEOUT_HEADER
from service.ipc.messages import FinishReason, Submit, decode_commands, encode_events
from tests.service.echo import EchoChannel
from tests.service.sequences import make_choice, make_delta, make_finish, make_hello, make_request

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ROUTES = [
    ("/v1/completions", {"prompt": "abc"}),
    ("/v1/chat/completions", CHAT),
    ("/v1/responses", {"input": "abc"}),
    ("/v1/messages", {**CHAT, "max_tokens": 8}),
    ("/v1/embeddings", {"input": "abc"}),
    ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("/rerank", {"query": "a", "documents": ["b"]}),
]


class LateQueue(EchoChannel):
    """Simulated worker that aborts every sequence, as if its queue timeout had passed."""

    def submit(self, message: bytes) -> None:
        for command in decode_commands(message).commands:
            if isinstance(command, Submit):
                self.submits.append(command)
                late = make_delta(command.uid, finish=make_finish(FinishReason.ABORT, num_completion_tokens=0))
                self.frontend.receive(encode_events([late]))


@pytest.fixture
def late(client: TestClient, frontend: Frontend) -> Iterator[LateQueue]:
    queue = LateQueue()
    queue.frontend = frontend
    channel: Any = queue
    (worker,) = frontend.context.workers
    usual, worker.channel = worker.channel, channel
    yield queue
    worker.channel = usual


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_timeout_becomes_the_deadline_of_a_submission(
    client: TestClient, queue: EchoChannel, path: str, body: dict[str, Any]
) -> None:
    for given, seconds in (({}, 60.0), ({"timeout": 5}, 5.0), ({"timeout": None}, 60.0), ({"timeout": 1e4}, 60.0)):
        before = time.monotonic()
        queue.submits.clear()
        assert client.post(path, json={**body, **given}).status_code == 200
        deadline = queue.submits[0].deadline_seconds
        assert deadline is not None
        assert before + seconds <= deadline <= time.monotonic() + seconds
        assert queue.submits[-1].tenant == "address testclient"
    queue.submits.clear()
    client.post(path, json=body, headers={"x-request-timeout": "7"})
    last = queue.submits[0]
    assert last.deadline_seconds is not None
    assert last.deadline_seconds - last.arrival_seconds == pytest.approx(7.0)


def named_field(response: Any) -> str:
    """Return the field or header that an error names: `param`, or in Anthropic's form the message's beginning."""
    error = response.json()["error"]
    return str(error["param"] if "param" in error else error["message"].removeprefix("the header ").split()[0])


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("timeout", [0, -1, "5", True, 86_401])
def test_an_invalid_timeout_is_rejected(
    client: TestClient, queue: EchoChannel, path: str, body: dict[str, Any], timeout: object
) -> None:
    response = client.post(path, json={**body, "timeout": timeout})
    assert (response.status_code, named_field(response)) == (400, "timeout")
    response = client.post(path, json=body, headers={"x-request-timeout": "soon"})
    assert (response.status_code, named_field(response)) == (400, "x-request-timeout")
    assert queue.submits == []


def test_only_the_first_choice_of_a_request_has_a_deadline(client: TestClient, queue: EchoChannel) -> None:
    client.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2, "timeout": 5})
    assert [submit.deadline_seconds is None for submit in queue.submits] == [False, True, True, True]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_expires_in_the_queue_gets_408_with_retry_after(
    client: TestClient, late: LateQueue, frontend: Frontend, stream: bool
) -> None:
    response = client.post("/v1/completions", json={"prompt": ["a", "b"], "stream": stream, "timeout": 5})
    assert response.status_code == 408
    assert response.json()["error"] == {
        "message": "the request did not start within its timeout of 5 s; try again later",
        "type": "timeout_error",
        "param": None,
        "code": "queue_timeout",
    }
    assert int(response.headers["retry-after"]) >= 1
    assert int(response.headers["retry-after-ms"]) >= 1
    assert response.headers["x-should-retry"] == "true"
    assert 'status="408"} 1.0' in client.get("/metrics").text
    assert frontend.context.engine_client.num_requests == 0


def test_a_replayed_sequence_has_no_deadline_if_it_had_begun(frontend: Frontend, queue: EchoChannel) -> None:
    queue.answers = False
    engine_client = frontend.context.engine_client
    for uid in ("begun", "waits"):
        request = make_request(make_choice(uid))
        request.terms = QueuePolicy(timeout_seconds=5.0)
        engine_client.submit(request)
    engine_client.receive([make_delta("begun", ids=(1,))])
    engine_client.receive([make_hello(1)])
    deadlines = {submit.uid: submit.deadline_seconds for submit in queue.submits if submit.attempt == 1}
    assert deadlines == {"begun": None, "waits": 5.0}


def test_a_request_with_too_long_a_predicted_wait_gets_429_and_is_not_submitted(
    client: TestClient, queue: EchoChannel
) -> None:
    """The simulated worker responds at once, so the test first adds the ending rate of a slow worker to admission."""
    frontend: Frontend = queue.frontend
    admission = frontend.context.engine_client.admission
    admission.admit([1, 1], QueuePolicy(tenant="address testclient"))
    for _ in range(200):
        admission._ended.add(1, 10.0)
    response = client.post("/v1/completions", json={"prompt": "a"})
    assert response.status_code == 429
    assert response.json()["error"]["code"] == "queue_time"
    assert queue.submits == []
    assert 'reason="queue_time"} 1.0' in client.get("/metrics").text
    assert client.post("/v1/completions", json={"prompt": "a", "timeout": 50}).status_code == 200


def test_the_openapi_document_names_the_timeout_of_each_engine_route() -> None:
    document = openapi_document()
    for path, operations in document["paths"].items():
        waits = path in {"/inspect/attention", *(route for route, _ in ROUTES)}
        told = [parameter["name"] for parameter in operations.get("post", {}).get("parameters", ())]
        assert (TIMEOUT_HEADER in told) == waits, path
        assert ("408" in str(operations) and "queue_timeout" in str(operations)) == waits, path
    for name in ("CompletionRequest", "ChatCompletionRequest", "EmbeddingRequest"):
        assert "timeout" in document["components"]["schemas"][name]["properties"]
