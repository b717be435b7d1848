"""HTTP/1.1 and server-sent events, read from the socket as they arrive, with arrival times.

Ordinary clients buffer: locust's `iter_lines` waits for 1,024 bytes, so a first token is reported together with the
tenth. Here only httptools' parser stands between `recv` and the time stamp.

The parsing is sans-io and has two drivers. `complete_blocking` uses plain sockets, which gevent makes cooperative
for locust. `AsyncClient` uses asyncio.
"""

import asyncio
import json
import os
import re
import socket
import time
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

import httptools

from loadtest.client.outcome import CompletionReader, Ending, Outcome
from loadtest.client.workload import CompletionRequest

COMPLETIONS_PATH = "/v1/completions"
RECEIVE_BYTES = 65536
# The server reads the same variable. Not a flag: flags show in the process list, and results store the command.
API_KEY_VARIABLE = "KVASIR_API_KEY"


@dataclass(frozen=True, slots=True)
class Target:
    """Address of the service, and the API key to send, if any."""

    host: str
    port: int
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str, *, api_key: str | None = None) -> Self:
        """Read `http://host[:port]`. Raises `ValueError` for anything else."""
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None or parts.path not in ("", "/"):
            raise ValueError(f"the service's address must look like http://127.0.0.1:8000, not {url!r}")
        return cls(parts.hostname, 80 if parts.port is None else parts.port, api_key)

    @property
    def url(self) -> str:
        """Base URL of the service."""
        return f"http://{self.host}:{self.port}"

    @property
    def authorization(self) -> dict[str, str]:
        """Authorization header with the API key, empty without a key."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def request_bytes(self, method: str, path: str, payload: Any = None, *, keep_alive: bool = True) -> bytes:
        """Return the bytes of a request. `payload` is sent as JSON; None sends no body."""
        body = b"" if payload is None else json.dumps(payload).encode()
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "User-Agent: kvasir-loadtest",
            f"Connection: {'keep-alive' if keep_alive else 'close'}",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in self.authorization.items()),
        ]
        if payload is not None:
            lines.append("Content-Type: application/json")
        return "\r\n".join([*lines, "", ""]).encode("ascii") + body


def api_key_given() -> str | None:
    """Return the key in `KVASIR_API_KEY`, or None. Raises `ValueError`, without the value, if it is not a valid key."""
    key = os.environ.get(API_KEY_VARIABLE, "").strip()
    if key and not re.fullmatch(r"[!-~]+", key):
        raise ValueError(f"{API_KEY_VARIABLE}: must be one word of visible ASCII characters")
    return key or None


class SseParser:
    """Parser from bytes to the `data` of complete events (WHATWG HTML, section 9.2.6).

    Comments and the fields `event`, `id` and `retry` are skipped: completion APIs do not use them.
    """

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []
        self._skip_newline = False  # the last bytes ended in CR: skip an LF that follows

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that these bytes complete."""
        if self._skip_newline and data:
            data = data.removeprefix(b"\n")
        self._skip_newline = data.endswith(b"\r")
        lines = (self._tail + data).splitlines(keepends=True)
        self._tail = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        events = []
        for line in lines:
            field, _, value = line.rstrip(b"\r\n").partition(b":")
            if field == b"data":
                self._data.append(value.removeprefix(b" "))
            elif line.strip(b"\r\n") == b"" and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


class Exchange:
    """One completion over one connection, independent of the I/O driver. Bytes are fed as they arrive."""

    def __init__(self, request: CompletionRequest, intended_seconds: float | None, reader: CompletionReader | None):
        self.sent_seconds = time.perf_counter()
        self._intended_seconds = self.sent_seconds if intended_seconds is None else intended_seconds
        self._completion = CompletionReader(request) if reader is None else reader
        self._parser = httptools.HttpResponseParser(self)
        self._sse: SseParser | None = None
        self._now = 0.0
        self._headers: dict[str, str] = {}
        self._content = bytearray()
        self.status: int | None = None
        self.complete = False
        self.reusable = False

    @property
    def over(self) -> bool:
        """True if the response has ended, or if the client wants to disconnect."""
        return self.complete or self._completion.wants_to_leave

    def feed(self, data: bytes, now: float) -> None:
        """Read bytes received at `now`. Raises `httptools.HttpParserError` if they are not HTTP."""
        self._now = now
        self._parser.feed_data(data)

    def end_of_connection(self, now: float) -> None:
        """Handle the end of the connection, which completes a response without a declared length."""
        delimited = "content-length" in self._headers or "transfer-encoding" in self._headers
        if self.status is not None and not delimited and not self.complete:
            self._now = now
            self.on_message_complete()
            self.reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header. Called by httptools."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Store the status and detect an event stream. Called by httptools."""
        self.status = self._parser.get_status_code()
        if self._headers.get("content-type", "").startswith("text/event-stream"):
            self._sse = SseParser()

    def on_body(self, body: bytes) -> None:
        """Read a part of the body. Called by httptools."""
        if self._sse is None:
            self._content.extend(body)
            return
        for event in self._sse.feed(body):
            self._completion.event(event, self._now)

    def on_message_complete(self) -> None:
        """Mark the response as complete. Called by httptools."""
        self.complete = True
        self.reusable = self._parser.should_keep_alive()
        if self._sse is None:
            self._completion.body(bytes(self._content))

    def failed(self, ending: Ending, detail: str) -> Outcome:
        """Return the outcome of a request that ended without a response."""
        return self._outcome(ending, detail, time.perf_counter())

    def finished(self, now: float) -> Outcome:
        """Return the outcome once `over`, or at the end of the connection."""
        if self._completion.wants_to_leave and not self.complete:
            return self._outcome(Ending.CANCELLED, "", now)
        if not self.complete or self.status is None:
            return self._outcome(Ending.CONNECTION, "the connection ended before the response", now)
        ending, detail = self._completion.judge(self.status)
        return self._outcome(ending, detail, now)

    def _outcome(self, ending: Ending, detail: str, now: float) -> Outcome:
        retry_after = self._headers.get("retry-after", "")  # a date counts as 0 seconds
        return self._completion.outcome(
            ending,
            detail,
            intended_seconds=self._intended_seconds,
            sent_seconds=self.sent_seconds,
            end_seconds=now,
            retry_after_seconds=float(retry_after) if ending is Ending.SHED and retry_after.isdecimal() else 0.0,
        )


def complete_blocking(
    target: Target, request: CompletionRequest, *, model: str | None, timeout_seconds: float
) -> Outcome:
    """Send one completion over its own connection and read it to its end.

    Every failure of the server is an outcome, not an exception.
    """
    exchange = Exchange(request, None, None)
    deadline = exchange.sent_seconds + timeout_seconds
    payload = target.request_bytes("POST", COMPLETIONS_PATH, request.body(model), keep_alive=False)
    try:
        with socket.create_connection((target.host, target.port), timeout=timeout_seconds) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(payload)
            while not exchange.over:
                connection.settimeout(max(1e-3, deadline - time.perf_counter()))
                data = connection.recv(RECEIVE_BYTES)
                now = time.perf_counter()
                if not data:
                    exchange.end_of_connection(now)
                    return exchange.finished(now)
                exchange.feed(data, now)
            return exchange.finished(now)
    except TimeoutError:
        return exchange.failed(Ending.TIMEOUT, f"no end within {timeout_seconds:g} s")
    except (OSError, httptools.HttpParserError) as error:
        return exchange.failed(Ending.CONNECTION, f"{type(error).__name__}: {error}")


class _Connection(asyncio.Protocol):
    """TCP connection that passes bytes with their arrival time to the current exchange."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._over: asyncio.Future[float] | None = None
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._exchange is None or self._over is None or self._over.done():
            self.close()  # unexpected bytes: the connection is out of step
            return
        try:
            self._exchange.feed(data, now)
        except httptools.HttpParserError as error:
            self._over.set_exception(ConnectionError(f"not HTTP: {error}"))
            return
        if self._exchange.over:
            self._over.set_result(now)

    def connection_lost(self, exc: Exception | None) -> None:
        now = time.perf_counter()
        self.closed = True
        if self._exchange is None or self._over is None or self._over.done():
            return
        if exc is not None:
            self._over.set_exception(ConnectionError(f"{type(exc).__name__}: {exc}"))
            return
        self._exchange.end_of_connection(now)
        self._over.set_result(now)

    def close(self) -> None:
        """Close at once, as a client that disconnects does."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    async def send(self, payload: bytes, exchange: Exchange) -> float:
        """Send a request and wait until the response ends or the client disconnects; return that time.

        Raises:
            ConnectionError: the connection broke, or its bytes are not HTTP.
        """
        if self._transport is None or self.closed:
            raise ConnectionError("the connection is closed")
        self._exchange = exchange
        self._over = asyncio.get_running_loop().create_future()
        self._transport.write(payload)
        return await self._over


class AsyncClient:
    """Client for completions over kept-alive connections, without a limit on concurrency."""

    def __init__(self, target: Target, *, timeout_seconds: float = 120.0) -> None:
        self.target = target
        self._timeout_seconds = timeout_seconds
        self._idle: list[_Connection] = []

    async def complete(
        self,
        request: CompletionRequest,
        *,
        model: str | None,
        intended_seconds: float | None = None,
        reader: CompletionReader | None = None,
    ) -> Outcome:
        """Send one completion and read it to its end. Every failure of the server is an outcome.

        `reader`: shows the chunks of the stream while they arrive.
        """
        payload = self.target.request_bytes("POST", COMPLETIONS_PATH, request.body(model))
        exchange = Exchange(request, intended_seconds, reader)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return exchange.finished(await self._send(payload, exchange))
        except TimeoutError:
            return exchange.failed(Ending.TIMEOUT, f"no end within {self._timeout_seconds:g} s")
        except OSError as error:
            return exchange.failed(Ending.CONNECTION, f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        """Close the idle connections. Other connections close when their requests end."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # let the transports run their closing callbacks

    async def _send(self, payload: bytes, exchange: Exchange) -> float:
        self._idle = [connection for connection in self._idle if not connection.closed]
        is_fresh = not self._idle
        connection = await self._open() if is_fresh else self._idle.pop()
        try:
            now = await connection.send(payload, exchange)
            if exchange.status is None and not is_fresh:
                # The server closed an idle connection just as it was reused; nothing of the response had arrived.
                connection = await self._open()
                now = await connection.send(payload, exchange)
        except BaseException:
            connection.close()
            raise
        if exchange.complete and exchange.reusable and not connection.closed:
            self._idle.append(connection)
        else:
            connection.close()
        return now

    async def _open(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self.target.host, self.target.port)
        return connection
