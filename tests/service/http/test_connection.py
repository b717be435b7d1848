"""Size limits of a request's head, complete or not."""

import asyncio
import json

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from service.http.connection import MAX_HEAD_BYTES, MAX_HEADERS
from tests.service.wire import Wire, connect


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    size = 0
    while (message := await receive())["type"] == "http.request":
        size += len(message["body"])
        if not message["more_body"]:
            break
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"%d" % size})


def talk(*chunks: bytes, to: ASGIApp = app) -> Wire:
    """Send the chunks of bytes one by one on one connection, and wait for the responses."""

    async def run() -> Wire:
        protocol, wire = connect(to, ServerState())
        for chunk in chunks:
            if wire.is_closing():
                break
            protocol.data_received(chunk)
            await asyncio.sleep(0)
        tasks = set(protocol.tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=60)
        protocol.connection_lost(None)
        return wire

    return asyncio.run(run())


def head(*fields: str, path: str = "/") -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: a", "content-length: 5", *fields, "", ""]).encode()


def status(wire: Wire) -> int:
    return int(wire.written.split()[1])


@pytest.mark.parametrize(
    ("request_head", "answer"),
    [
        (head(), 200),
        (head(*("a: b" for _ in range(MAX_HEADERS - 2))), 200),
        (head(*("a: b" for _ in range(MAX_HEADERS - 1))), 431),
        (head("a: " + "b" * (MAX_HEAD_BYTES - 1000)), 200),
        (head("a: " + "b" * MAX_HEAD_BYTES), 431),
        (head(path="/" + "b" * MAX_HEAD_BYTES), 431),
        (head("a" * MAX_HEAD_BYTES + ": b"), 431),
        (b"GARBAGE\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost a\r\n\r\n", 400),
    ],
)
@pytest.mark.parametrize("piece", [1_000_000, 7_000])
def test_a_request_head_has_a_size_limit(request_head: bytes, answer: int, piece: int) -> None:
    sent = request_head + b"12345"
    wire = talk(*(sent[start : start + piece] for start in range(0, len(sent), piece)))
    assert status(wire) == answer
    if answer != 200:
        assert wire.is_closed
        fields, _, body = wire.written.partition(b"\r\n\r\n")
        assert b"content-length: %d" % len(body) in fields
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == ("head_too_large" if answer == 431 else "invalid_request")


def test_the_head_limit_applies_to_each_pipelined_request_alone() -> None:
    body = b"x" * 100_000
    one = head().replace(b"length: 5", b"length: 100000")
    for chunks in (
        ((head() + b"12345") * 2000 + head()[:30], head()[30:] + b"12345"),
        (one[:20], one[20:] + body + one[:20], one[20:] + body),
        (one + body[:10], body[10:] + one[:20], one[20:] + body),
    ):
        wire = talk(*chunks)
        assert status(wire) == 200
        assert b" 431 " not in wire.written


@pytest.mark.parametrize("beginning", [b"GET /" + b"a" * 10, b"GET / HTTP/1.1\r\na: ", b"GET / HTTP/1.1\r\na"])
def test_a_request_head_without_end_is_rejected(beginning: bytes) -> None:
    wire = talk(beginning, *[b"x" * 10_000] * 100)
    assert (status(wire), wire.is_closed) == (431, True)


def test_a_body_does_not_count_toward_the_head_limit() -> None:
    body = b"x" * 300_000
    whole = head().replace(b"length: 5", b"length: 300000") + body
    for cut in (30, len(whole) - 299_000):
        wire = talk(whole[:cut], whole[cut:])
        assert status(wire) == 200
        assert b"\r\n300000\r\n" in wire.written


def test_the_head_limit_applies_to_every_request_of_a_connection() -> None:
    wire = talk(head() + b"12345", b"GET / HTTP/1.1\r\na: ", *[b"x" * 10_000] * 100)
    assert wire.is_closed
    assert b"HTTP/1.1 431 " in wire.written


@pytest.mark.parametrize("offer", [b"", b"connection: upgrade\r\nupgrade: h2c\r\n", b"connection: keep-alive\r\n"])
def test_http_1_0_gets_no_chunked_encoding_and_connection_close(offer: bytes) -> None:
    """An HTTP/1.0 client would read the chunk sizes of chunked encoding as part of the body."""
    wire = talk(b"POST / HTTP/1.0\r\n" + offer + b"content-length: 5\r\nexpect: 100-continue\r\n\r\n12345")
    fields, _, body = wire.written.partition(b"\r\n\r\n")
    assert fields.splitlines() == [b"HTTP/1.1 200 OK", b"connection: close"]
    assert (body, wire.is_closed) == (b"5", True)


def test_a_response_of_known_length_has_content_length_in_any_version() -> None:
    async def known(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"Content-Length", b"4")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ab", "more_body": True})
        await send({"type": "http.response.body", "body": b"cd"})

    wires = [talk(b"GET / HTTP/%s\r\nhost: a\r\n\r\n" % version, to=known) for version in (b"1.0", b"1.1")]
    assert [wire.written.partition(b"\r\n\r\n")[2] for wire in wires] == [b"abcd"] * 2
    assert [b"\r\ncontent-length: 4\r\n" in wire.written for wire in wires] == [True] * 2
    assert [b"\r\nconnection: close\r\n" in wire.written for wire in wires] == [True, False]


@pytest.mark.parametrize("name", ["Host", "content-encoding", "Idempotency-Key", "last-event-id", "x-request-timeout"])
def test_a_single_value_header_that_occurs_twice_is_rejected(name: str) -> None:
    fields = [f"{name}: identity", f"{name.upper()}: identity"]
    assert status(talk(head(*fields[: name != "Host"]) + b"12345")) == 200
    wire = talk(head(*fields) + b"12345")
    assert (status(wire), wire.is_closed) == (400, True)
    error = json.loads(wire.written.partition(b"\r\n\r\n")[2])["error"]
    assert (error["message"], error["param"]) == (
        f"the header {name.lower()} occurs twice; send one value",
        name.lower(),
    )


def test_a_list_header_may_occur_twice() -> None:
    assert status(talk(head("x-forwarded-for: a", "x-forwarded-for: b", "a: b", "a: c") + b"12345")) == 200
