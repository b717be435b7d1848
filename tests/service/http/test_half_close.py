"""Half-closed and closed connections over real sockets, because only the kernel can tell them apart."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from uvicorn.config import Config
from uvicorn.server import ServerState

from service.http.connection import MAX_AHEAD_BYTES, BoundedHttpProtocol, ConnectionLimits
from service.protocol.errors import ApiError
from tests.service.http.test_connections import App, until

PATIENCE_SECONDS = 60.0
GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


def post(body: bytes, *fields: bytes, version: bytes = b"1.1") -> bytes:
    head = [b"POST / HTTP/" + version, b"host: a", b"content-length: %d" % len(body), *fields, b"", b""]
    return b"\r\n".join(head) + body


class Client:
    """Client connection to a server in the same event loop."""

    def __init__(
        self, app: App, state: ServerState, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.app, self.state, self.reader, self.writer = app, state, reader, writer

    async def rest(self) -> bytes:
        """Return all bytes that arrive until the server closes the connection."""
        return await asyncio.wait_for(self.reader.read(), PATIENCE_SECONDS)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await asyncio.wait_for(self.writer.drain(), PATIENCE_SECONDS)


def run(
    scene: Callable[[Client], Coroutine[Any, Any, None]],
    loop_factory: Any = None,
    *,
    limits: ConnectionLimits | None = None,
    count: Callable[[ApiError], None] = lambda error: None,
    asgi: Any = None,
) -> None:
    async def play() -> None:
        state, app = ServerState(), App()
        config = Config(asgi or app, http=BoundedHttpProtocol, log_config=None)
        server = await asyncio.get_running_loop().create_server(
            lambda: BoundedHttpProtocol(config, state, {}, limits=limits or ConnectionLimits(), count=count),
            "127.0.0.1",
            0,
        )
        address = server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(*address[:2])
        try:
            await scene(Client(app, state, reader, writer))
        finally:
            writer.close()
            app.go.set()
            server.close()
            await until(lambda: not state.tasks)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(play())


@pytest.fixture(params=[None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def loop_factory(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("is_slow", [False, True])
def test_a_half_closed_client_gets_its_response(version: bytes, is_slow: bool, loop_factory: Any) -> None:
    """The server probes the client with the first bytes of the response."""

    async def scene(client: Client) -> None:
        if is_slow:
            client.app.go.clear()
        await client.send(post(b"story", version=version))
        client.writer.write_eof()
        if is_slow:
            assert await asyncio.wait_for(client.reader.readexactly(3), PATIENCE_SECONDS) == b"HTT"
            client.app.go.set()
        answer = (b"HTT" if is_slow else b"") + await client.rest()
        last_field = b"connection: close\r\n"  # missing if the server wrote the response before it saw the FIN
        assert not is_slow or last_field in answer
        assert answer.replace(last_field, b"") == b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nstory"
        assert client.app.ended == 0

    run(scene, loop_factory)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_closed_connection_ends_its_request(version: bytes, loop_factory: Any) -> None:
    """The server has sent nothing, so at first it sees only the client's FIN, as of a half-closed client."""

    async def scene(client: Client) -> None:
        client.app.go.clear()
        await client.send(post(b"story", version=version))
        await until(lambda: client.app.fields)
        client.writer.close()
        await until(lambda: client.app.ended == 1)

    run(scene, loop_factory)


def test_a_half_closed_connection_that_closes_ends_its_request() -> None:
    async def scene(client: Client) -> None:
        client.app.go.clear()
        await client.send(post(b"story"))
        client.writer.write_eof()
        assert await asyncio.wait_for(client.reader.readexactly(2), PATIENCE_SECONDS) == b"HT"
        client.writer.close()
        await until(lambda: client.app.ended == 1)

    run(scene)


def test_an_incomplete_request_of_a_half_closed_client_is_dropped(loop_factory: Any) -> None:
    """The complete requests before the incomplete request get responses."""

    async def scene(client: Client) -> None:
        client.app.go.clear()
        await client.send(post(b"one") + post(b"two") + post(b"three")[:-1])
        client.writer.write_eof()
        await until(lambda: client.app.fields)
        client.app.go.set()
        answers = await client.rest()
        assert answers.count(b"HTTP/1.1 200 OK") == 2
        assert answers.endswith(b"connection: close\r\n\r\ntwo")

    run(scene, loop_factory)


@pytest.mark.parametrize("ends", [False, True])
def test_any_number_of_pipelined_requests_gets_responses_in_order(ends: bool, loop_factory: Any) -> None:
    """The client sends more than the read-ahead limit before it reads a response."""
    number = 2 * MAX_AHEAD_BYTES // len(post(b"0000"))

    async def scene(client: Client) -> None:
        client.app.go.clear()
        last = b"" if ends else post(b"last", b"connection: close")
        sent = b"".join(post(b"%04d" % index) if index % 3 else GET for index in range(number))
        sending = asyncio.create_task(client.send(sent + last))
        await until(lambda: client.app.fields)
        client.app.go.set()
        await sending
        if ends:
            client.writer.write_eof()
        answers = await client.rest()
        bodies = [answer.partition(b"\r\n\r\n")[2] for answer in answers.split(b"HTTP/1.1 200 OK\r\n")[1:]]
        told = [b"%04d" % index if index % 3 else b"" for index in range(number)]
        assert bodies == told + ([] if ends else [b"last"])

    run(scene, loop_factory)
