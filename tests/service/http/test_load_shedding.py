"""Load shedding: a full server rejects requests by their headers."""

import asyncio

import pytest
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from service.admission.controller import QueuePolicy
from service.api.app import Frontend
from service.api.openapi import WAITING_PATHS
from service.http.api_keys import ApiKeys
from service.http.middleware import EarlyRejection
from service.ipc.shared_state import Lifecycle, Phase
from service.protocol.errors import Overloaded
from tests.service.echo import EchoChannel

WAITS = {"prompt": "a", "max_tokens": 2}


@pytest.fixture
def full(frontend: Frontend) -> None:
    """Fill the queue for the test client's tenant."""
    frontend.context.admission.admit([1, 1, 1, 1], QueuePolicy(tenant="address testclient"))


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("path", sorted(WAITING_PATHS))
def test_a_request_that_cannot_be_admitted_is_rejected_before_its_body_is_parsed(
    client: TestClient, frontend: Frontend, path: str
) -> None:
    answer = client.post(path, content=b"this is not JSON", headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
    assert int(answer.headers["retry-after"]) >= 1
    assert (answer.headers["x-should-retry"], answer.headers["x-request-id"]) == ("true", "mine")
    assert 'reason="queue_full"} 1.0' in client.get("/metrics").text
    assert frontend.context.admission.num_sequences == 4


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b'{"timeout": ', {}),
        (b"{", {"idempotency-key": "one"}),
        (b"{", {"last-event-id": "one"}),
        (b"{", {"accept": " Text/Event-Stream"}),
        (b"{", {"content-encoding": "gzip"}),
    ],
)
def test_a_request_that_cannot_be_rejected_by_headers_is_read(
    client: TestClient, body: bytes, headers: dict[str, str]
) -> None:
    answer = client.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code in (400, 415)


def test_a_body_in_several_parts_reaches_its_route() -> None:
    messages: list[Message] = [
        {"type": "http.request", "body": part, "more_body": part != b"c"} for part in (b"a", b"b", b"c")
    ]
    read: list[Message] = []

    async def receive() -> Message:
        return messages.pop(0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while not read or read[-1]["more_body"]:
            read.append(await receive())

    def refuse(scope: Scope) -> None:
        raise Overloaded("full", retry_after_seconds=1.0)

    async def send(message: Message) -> None:
        raise AssertionError(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    middleware = EarlyRejection(
        app,
        keys=ApiKeys(),
        open_paths=frozenset(),
        waiting_paths=WAITING_PATHS,
        reject=refuse,
        count=lambda error: None,
    )
    asyncio.run(middleware(scope, receive, send))
    assert [message["body"] for message in read] == [b"a", b"b", b"c"]


@pytest.mark.usefixtures("full")
def test_other_routes_and_methods_are_not_shed(client: TestClient) -> None:
    assert client.get("/v1/models").status_code == 200
    assert client.post("/tokenize", json={"prompt": "a"}).status_code == 200
    assert client.get("/v1/completions").status_code == 405


def test_no_request_is_shed_while_there_is_capacity(client: TestClient, queue: EchoChannel) -> None:
    assert client.post("/v1/completions", json=WAITS).status_code == 200
    assert client.post("/v1/completions", json={**WAITS, "stream": True}).status_code == 200
    assert len(queue.submits) == 2


def test_an_invalid_timeout_and_a_draining_server_are_reported_unread(client: TestClient, lifecycle: Lifecycle) -> None:
    answer = client.post("/v1/completions", content=b"{", headers={"x-request-timeout": "soon"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-timeout")
    lifecycle.enter(Phase.DRAINING)
    answer = client.post("/v1/completions", content=b"{")
    assert (answer.status_code, answer.headers["connection"]) == (503, "close")
