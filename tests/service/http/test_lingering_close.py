"""Error responses to clients that are still sending, over real sockets, because the kernel sends the resets."""

import asyncio
import json
from collections.abc import Callable
from threading import Semaphore
from typing import Any

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from service.http import connection
from service.http.connection import BoundedHttpProtocol, ConnectionLimits
from service.protocol.errors import ApiError
from tests.service.http.test_connections import GET, POST, until
from tests.service.http.test_half_close import PATIENCE_SECONDS, Client, post, run

LARGE = b"x" * 20_000_000  # more than the kernel buffers


@pytest.fixture(params=[None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def loop_factory(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(autouse=True)
def no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINGER_SECONDS", 10 * PATIENCE_SECONDS)


def is_free(limits: ConnectionLimits) -> Callable[[], bool]:
    """Return a condition that takes a slot for a lingering connection."""
    return lambda: limits.linger_slots.acquire(blocking=False)


async def close_lingering(client: Client, limits: ConnectionLimits) -> None:
    """Close the client's end of a connection, which lingers until then."""
    assert not is_free(limits)()
    client.writer.close()
    await until(is_free(limits))


def test_a_client_over_the_limit_reads_its_error_whole(loop_factory: Any) -> None:
    """The client sends its requests after the error. The server drops them, and does not count the connection."""
    limits, rejected = ConnectionLimits(max_connections=0, linger_slots=Semaphore(1)), list[ApiError]()

    async def scene(client: Client) -> None:
        await until(lambda: rejected)
        assert client.state.connections == set()
        await client.send(GET + post(LARGE) + GET)
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert json.loads(body)["error"]["code"] == "too_many_connections"
        await close_lingering(client, limits)
        assert client.app.fields == []

    run(scene, loop_factory, limits=limits, count=rejected.append)


def test_a_connection_lingers_only_for_a_time(loop_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client sends byte by byte, and does not close."""
    monkeypatch.setattr(connection, "LINGER_SECONDS", 0.05)
    limits = ConnectionLimits(max_connections=0, linger_slots=Semaphore(1))

    async def scene(client: Client) -> None:
        await client.rest()

        def is_free_in_spite_of_a_byte() -> bool:
            client.writer.write(b"x")
            return is_free(limits)()

        await until(is_free_in_spite_of_a_byte)

    run(scene, loop_factory, limits=limits)


def test_a_lingering_connection_discards_a_limited_number_of_bytes(
    loop_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_LINGER_BYTES", 1000)
    limits = ConnectionLimits(max_connections=0, linger_slots=Semaphore(1))

    async def scene(client: Client) -> None:
        await client.rest()
        client.writer.write(b"x" * 1000)
        client.writer.write(b"x")
        await until(is_free(limits))

    run(scene, loop_factory, limits=limits)


def test_an_error_during_a_request_disconnects_the_request_at_once(loop_factory: Any) -> None:
    """Its route, which begins only after the error, does not ask for the body."""
    limits = ConnectionLimits(linger_slots=Semaphore(1))

    async def scene(client: Client) -> None:
        await client.send(POST + b"transfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\nzz\r\n")
        await until(lambda: client.app.ended == 1)
        await client.send(LARGE)
        assert (await client.rest()).startswith(b"HTTP/1.1 400 ")
        await close_lingering(client, limits)

    run(scene, loop_factory, limits=limits)


def test_an_error_after_pipelined_responses_arrives(loop_factory: Any) -> None:
    limits = ConnectionLimits(linger_slots=Semaphore(1))

    async def scene(client: Client) -> None:
        client.app.go.clear()
        await client.send(post(b"one") + post(b"two") + b"GARBAGE\r\n\r\n")
        await until(lambda: client.app.fields)
        client.app.go.set()
        await client.send(LARGE)
        answers = (await client.rest()).split(b"HTTP/1.1 ")
        assert [answer[:3] for answer in answers[1:]] == [b"200", b"200", b"400"]
        await close_lingering(client, limits)

    run(scene, loop_factory, limits=limits)


def test_an_error_before_the_end_of_a_body_arrives(loop_factory: Any) -> None:
    """The client asks for the connection to be closed, and reads only after it has sent its body."""
    limits = ConnectionLimits(linger_slots=Semaphore(1))

    async def reject(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"3")]})
        await send({"type": "http.response.body", "body": b"end"})

    async def scene(client: Client) -> None:
        await client.send(post(LARGE, b"connection: close")[:1000])
        await until(lambda: not client.state.connections)
        await client.send(LARGE[1000:])
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert answer.endswith(b"end")
        await close_lingering(client, limits)

    run(scene, loop_factory, limits=limits, asgi=reject)


def test_a_connection_with_unread_bytes_does_not_make_room(loop_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop may be so late that a request waits in the kernel for longer than the minimum idle time."""
    monkeypatch.setattr(connection, "MIN_IDLE_SECONDS", 0.001)

    async def scene(client: Client) -> None:
        await until(lambda: client.state.connections)
        (protocol,) = client.state.connections
        assert isinstance(protocol, BoundedHttpProtocol)
        protocol.flow.pause_reading()
        await client.send(post(b"story"))
        idle_at = asyncio.get_running_loop().time() + connection.MIN_IDLE_SECONDS
        await until(lambda: asyncio.get_running_loop().time() > idle_at)
        reader, writer = await asyncio.open_connection(*client.writer.get_extra_info("peername"))
        try:
            assert (await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)).startswith(b"HTTP/1.1 503 ")
        finally:
            writer.close()
        protocol.flow.resume_reading()
        assert (await client.reader.readuntil(b"story")).startswith(b"HTTP/1.1 200 ")

    run(scene, loop_factory, limits=ConnectionLimits(max_connections=1))
