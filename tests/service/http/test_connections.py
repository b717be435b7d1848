"""Slow clients, pipelined requests, and ambiguous framing."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from service.http.connection import MAX_AHEAD_BYTES, MAX_HEAD_BYTES, MIN_IDLE_SECONDS, ConnectionLimits
from service.protocol.errors import ApiError
from tests.service import virtual_time
from tests.service.wire import connect

QUICK = ConnectionLimits(client_seconds=0.05)
PATIENT = ConnectionLimits(client_seconds=1000.0)
GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: a\r\n"


class App:
    """ASGI echo app. A response waits for the event `go`; `ended` counts disconnects before the response."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.ended = 0
        self.fields: list[list[tuple[bytes, bytes]]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, is_more = b"", True
        while is_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.ended += 1
                return
            body, is_more = body + message["body"], message["more_body"]
        self.fields.append(list(scope["headers"]))
        if not self.go.is_set():
            left: asyncio.Task[Any] = asyncio.create_task(receive())  # type: ignore[arg-type]
            going = asyncio.create_task(self.go.wait())
            await asyncio.wait([left, going], return_when=asyncio.FIRST_COMPLETED)
            if left.done():
                self.ended += 1
                return
            left.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})


def run(scene: Callable[[App, ServerState], Coroutine[Any, Any, None]]) -> None:
    async def play() -> None:
        state = ServerState()
        await scene(App(), state)
        for protocol in list(state.connections):
            protocol.connection_lost(None)
        await asyncio.gather(*state.tasks)

    virtual_time.run(play())


async def until(condition: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + 20
    while not condition():
        assert loop.time() < deadline
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),
        (b"\r\n", b""),
        (b"GET / HTTP/1.1\r\nhost: ", b"408"),
        (POST + b"content-length: 5\r\n\r\nab", b"408"),
        (POST + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n", b"408"),
    ],
)
def test_an_incomplete_request_times_out(sent: bytes, status: bytes) -> None:
    refused: list[ApiError] = []

    async def scene(app: App, state: ServerState) -> None:
        protocol, wire = connect(app, state, limits=QUICK, count=refused.append)
        protocol.data_received(sent)
        await until(lambda: wire.is_closed)
        assert wire.written[9:12] == status
        if status:
            assert json.loads(wire.written.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
        protocol.connection_lost(None)
        await until(lambda: not state.tasks)
        assert app.ended == (b"\r\n\r\n" in sent)

    run(scene)
    assert [error.status for error in refused] == ([408] if status else [])


def test_an_incomplete_message_request_gets_anthropics_error() -> None:
    async def scene(app: App, state: ServerState) -> None:
        protocol, wire = connect(app, state, limits=QUICK)
        protocol.data_received(b"POST /v1/messages HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nab")
        await until(lambda: wire.is_closed)
        body = json.loads(wire.written.partition(b"\r\n\r\n")[2])
        assert (wire.written[9:12], body["type"], body["error"]["type"]) == (b"408", "error", "timeout_error")
        protocol.connection_lost(None)
        await until(lambda: not state.tasks)

    run(scene)


def test_empty_lines_do_not_extend_the_timeout() -> None:
    async def scene(app: App, state: ServerState) -> None:
        protocol, wire = connect(app, state, limits=QUICK)
        protocol.data_received(GET)
        await until(lambda: wire.written.endswith(b"\r\n\r\n"))

        def is_closed_in_spite_of_a_line() -> bool:
            protocol.data_received(b"\r\n")
            return wire.is_closed

        await until(is_closed_in_spite_of_a_line)

    run(scene)


def test_a_long_body_gets_more_time_up_to_a_limit() -> None:
    """Each 10 kB of a body extend the timeout by 1 s; bytes beyond the maximum body size extend it no further."""
    limits = ConnectionLimits(client_seconds=0.05, max_body_bytes=1)

    async def scene(app: App, state: ServerState) -> None:
        protocol, wire = connect(app, state, limits=ConnectionLimits(client_seconds=0.05))
        bounded, cut = connect(app, state, limits=limits)
        for each in (protocol, bounded):
            each.data_received(POST + b"content-length: 2000000\r\n\r\n" + b"x" * 1_000_000)
        await until(lambda: cut.is_closed)
        assert not wire.is_closed

    run(scene)


def test_a_client_that_waits_for_a_response_is_not_disconnected() -> None:
    async def scene(app: App, state: ServerState) -> None:
        app.go.clear()
        waiting, wire = connect(app, state, limits=QUICK)
        waiting.data_received(POST + b"content-length: 2\r\n\r\nok")
        idle, other = connect(app, state, limits=QUICK)
        await until(lambda: other.is_closed)
        assert not wire.is_closed
        app.go.set()
        await until(lambda: wire.written.endswith(b"ok"))
        assert not idle.is_busy

    run(scene)


@pytest.mark.parametrize("is_closing", [False, True])
def test_a_client_that_reads_nothing_is_disconnected(is_closing: bool) -> None:
    """A client that reads slowly is served; the limit also holds for a response's last bytes."""

    async def scene(app: App, state: ServerState) -> None:
        protocol, wire = connect(app, state, limits=QUICK)
        wire.num_unsent, wire.is_closed = 10_000_000, is_closing
        protocol.pause_writing()
        for _ in range(60):  # 0.3 s
            wire.num_unsent -= 100_000
            await asyncio.sleep(0.005)
        assert not wire.is_aborted
        await until(lambda: wire.is_aborted)

    run(scene)


def test_a_connection_over_the_limit_closes_the_longest_idle_connection() -> None:
    limits = ConnectionLimits(max_connections=2, client_seconds=1000.0)

    async def scene(app: App, state: ServerState) -> None:
        app.go.clear()
        busy, first = connect(app, state, limits=limits)
        busy.data_received(GET)
        _, slow = connect(app, state, limits=limits)
        await asyncio.sleep(MIN_IDLE_SECONDS)
        third, wire = connect(app, state, limits=limits)
        assert (first.is_aborted, slow.is_aborted, wire.is_closed) == (False, True, False)
        third.data_received(GET)
        _, refused = connect(app, state, limits=limits)
        assert not wire.is_closed
        assert refused.is_closed
        head, _, body = refused.written.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 1\r\n" in head
        assert json.loads(body)["error"]["code"] == "too_many_connections"
        app.go.set()
        await until(lambda: b" 200 " in wire.written and b" 200 " in first.written)

    run(scene)


def is_rejected(app: App, state: ServerState, limits: ConnectionLimits) -> bool:
    """Open a connection, and return True if the server rejects it."""
    protocol, wire = connect(app, state, limits=limits)
    if wire.is_closed:
        protocol.connection_lost(None)
    return wire.written[9:12] == b"503"


def test_only_a_connection_that_is_idle_for_long_enough_makes_room() -> None:
    """The first request of a new connection may be on its way, and a response may be in the send buffer."""
    limits = ConnectionLimits(max_connections=2, client_seconds=1000.0)

    async def scene(app: App, state: ServerState) -> None:
        _, new = connect(app, state, limits=limits)
        answered, wire = connect(app, state, limits=limits)
        await asyncio.sleep(MIN_IDLE_SECONDS / 2)
        assert is_rejected(app, state, limits)
        answered.data_received(GET)
        await until(lambda: b" 200 " in wire.written)
        wire.num_unsent = 1
        assert is_rejected(app, state, limits)
        wire.num_unsent = 0
        assert not is_rejected(app, state, limits)
        assert (wire.is_aborted, new.is_aborted) == (True, False)

    run(scene)


def test_a_lost_connection_disconnects_all_its_requests() -> None:
    """Without this protocol, uvicorn disconnects only the last pipelined request."""

    async def scene(app: App, state: ServerState) -> None:
        app.go.clear()
        protocol, _ = connect(app, state, limits=PATIENT)
        protocol.data_received(GET * 2)
        await until(lambda: app.fields)
        protocol.connection_lost(None)
        await until(lambda: app.ended == 1)

    run(scene)


def test_reading_pauses_while_many_unparsed_bytes_wait() -> None:
    """Any number of pipelined requests is served in bounded memory."""
    number = MAX_AHEAD_BYTES // len(GET) + 100

    async def scene(app: App, state: ServerState) -> None:
        app.go.clear()
        protocol, wire = connect(app, state, limits=PATIENT)
        protocol.data_received(GET * number)
        await until(lambda: app.fields)
        assert protocol.flow.read_paused
        assert len(state.tasks) == 1
        assert len(protocol.pipeline) < 60
        app.go.set()
        await until(lambda: wire.written.count(b" 200 ") == number)
        assert not protocol.flow.read_paused
        protocol.data_received(GET)
        await until(lambda: wire.written.count(b" 200 ") == number + 1)

    run(scene)


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        (b"GARBAGE\r\n\r\n", b"400"),
        (POST + b"transfer-encoding: gzip\r\n\r\n", b"415"),
        (POST + b"content-length: 5\r\n\r\nab", b"408"),
    ],
)
def test_an_error_is_sent_after_the_responses_to_earlier_requests(wrong: bytes, status: bytes) -> None:
    """The client would otherwise read the error as the response to an earlier request."""

    async def scene(app: App, state: ServerState) -> None:
        app.go.clear()
        refused: list[ApiError] = []
        protocol, wire = connect(app, state, limits=QUICK, count=refused.append)
        protocol.data_received(GET * 2 + wrong)
        await until(lambda: refused)
        assert wire.written == b""
        app.go.set()
        await until(lambda: wire.is_closed)
        assert [part[:3] for part in wire.written.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", status]
        assert (len(refused), wire.is_aborted) == (1, False)

    run(scene)


@pytest.mark.parametrize(
    ("fields", "body", "status"),
    [
        (b"transfer-encoding: chunked\r\n", b"2\r\nok\r\n0\r\n\r\n", b"200"),
        (b"transfer-encoding: gzip, chunked\r\n", b"2\r\nok\r\n0\r\n\r\n", b"415"),
        (b"transfer-encoding: chunked\r\ncontent-length: 2\r\n", b"ok", b"400"),
        (b"transfer-encoding: chunked\r\n", b"2;" + b"a" * (4 * MAX_HEAD_BYTES) + b"\r\nok\r\n0\r\n\r\n", b"400"),
        (b"transfer-encoding: chunked\r\n", b"2\r\nok\r\n0\r\na: " + b"a" * (4 * MAX_HEAD_BYTES), b"400"),
        (b"transfer-encoding: chunked\r\n", b"1\r\no\r\n" * 100_000 + b"0\r\n\r\n", b"200"),
    ],
)
def test_ambiguous_or_costly_body_framing_is_rejected(fields: bytes, body: bytes, status: bytes) -> None:
    async def scene(app: App, state: ServerState) -> None:
        protocol, wire = connect(app, state, limits=PATIENT)
        for start in range(0, len(sent := POST + fields + b"\r\n" + body), 50_000):
            protocol.data_received(sent[start : start + 50_000])
        await until(lambda: wire.written)
        assert wire.written[9:12] == status

    run(scene)


def test_trailer_fields_are_not_header_fields() -> None:
    async def scene(app: App, state: ServerState) -> None:
        protocol, _ = connect(app, state, limits=PATIENT)
        chunked = b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nauthorization: Bearer x\r\n\r\n"
        protocol.data_received(POST + chunked)
        await until(lambda: app.fields)
        assert [name for name, _ in app.fields[0]] == [b"host", b"transfer-encoding"]

    run(scene)


@pytest.mark.parametrize("cut", [10, 60, 1000])
@pytest.mark.parametrize("protocol_name", [b"h2c", b"websocket"])
def test_an_upgrade_offer_is_ignored(protocol_name: bytes, cut: int) -> None:
    """Java's client offers HTTP/2 with its first request and sends the body as HTTP/1.1."""
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: " + protocol_name + b"\r\ncontent-length: 2\r\n\r\nok"

    async def scene(app: App, state: ServerState) -> None:
        protocol, wire = connect(app, state, limits=PATIENT)
        sent = POST + offer
        protocol.data_received(sent[:cut])
        protocol.data_received(sent[cut:])
        await until(lambda: wire.written.endswith(b"ok"))
        protocol.data_received(POST + b"content-length: 3\r\n\r\ntoo")
        await until(lambda: wire.written.endswith(b"too"))
        protocol.data_received(b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n")
        assert wire.is_closed
        assert wire.written.count(b"HTTP/1.1 400 ") == 1

    run(scene)
