"""HTTP/1.1 and server-sent events, read from the socket as they arrive, with arrival times.

Ordinary clients buffer: locust's `iter_lines` waits for 1,024 bytes, so a first token is reported together with the
tenth. Here only httptools' parser stands between `recv` and the time stamp.

The parsing is sans-io and has two drivers. `complete_blocking` uses plain sockets, which gevent makes cooperative
for locust. `AsyncClient` uses asyncio.
"""

import asyncio
import dataclasses
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


class ResponseReader:
    """Reader of one HTTP response, fed as bytes arrive. A completion goes to its `CompletionReader`."""

    def __init__(self, completion: CompletionReader | None = None) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._completion = completion
        self._sse: SseParser | None = None
        self._now = 0.0
        self.headers: dict[str, str] = {}
        self.status: int | None = None
        self.content = bytearray()
        self.complete = False
        self.reusable = False

    @property
    def retry_after_seconds(self) -> float:
        """Seconds in the `Retry-After` header; 0 without the header, and for a date."""
        value = self.headers.get("retry-after", "")
        return float(value) if value.isdecimal() else 0.0

    def feed(self, data: bytes, now: float) -> None:
        """Read bytes received at `now`. Raises `httptools.HttpParserError` if they are not HTTP."""
        self._now = now
        self._parser.feed_data(data)

    def end_of_connection(self, now: float) -> None:
        """Handle the end of the connection, which completes a response without a declared length."""
        delimited = "content-length" in self.headers or "transfer-encoding" in self.headers
        if self.status is not None and not delimited and not self.complete:
            self._now = now
            self.on_message_complete()
            self.reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header. Called by httptools."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Store the status and detect an event stream. Called by httptools."""
        self.status = self._parser.get_status_code()
        if self.headers.get("content-type", "").startswith("text/event-stream"):
            self._sse = SseParser()

    def on_body(self, body: bytes) -> None:
        """Read a part of the body. Called by httptools."""
        if self._sse is None:
            self.content.extend(body)
            return
        for event in self._sse.feed(body):
            if self._completion is not None:
                self._completion.event(event, self._now)

    def on_message_complete(self) -> None:
        """Mark the response as complete. Called by httptools."""
        self.complete = True
        self.reusable = self._parser.should_keep_alive()
        if self._completion is not None and self._sse is None:
            self._completion.body(bytes(self.content), self._now)


class _Exchange:
    """One completion over one connection, independent of the I/O driver."""

    def __init__(self, request: CompletionRequest, intended_seconds: float | None) -> None:
        self.sent_seconds = time.perf_counter()
        self._intended_seconds = self.sent_seconds if intended_seconds is None else intended_seconds
        self._completion = CompletionReader(request)
        self.response = ResponseReader(self._completion)

    @property
    def over(self) -> bool:
        return self.response.complete or self._completion.wants_to_leave

    def failed(self, ending: Ending, detail: str) -> Outcome:
        return self._outcome(ending, detail, time.perf_counter())

    def finished(self, now: float) -> Outcome:
        """Return the outcome once `over`, or at the end of the connection."""
        if self._completion.wants_to_leave and not self.response.complete:
            return self._outcome(Ending.CANCELLED, "", now)
        if not self.response.complete or self.response.status is None:
            return self._outcome(Ending.CONNECTION, "the connection ended before the response", now)
        ending, detail = self._completion.judge(self.response.status)
        return self._outcome(ending, detail, now)

    def _outcome(self, ending: Ending, detail: str, now: float) -> Outcome:
        outcome = self._completion.outcome(
            ending,
            detail,
            intended_seconds=self._intended_seconds,
            sent_seconds=self.sent_seconds,
            end_seconds=now,
        )
        if ending is Ending.SHED:
            return dataclasses.replace(outcome, retry_after_seconds=self.response.retry_after_seconds)
        return outcome


def complete_blocking(
    target: Target, request: CompletionRequest, *, model: str | None, timeout_seconds: float
) -> Outcome:
    """Send one completion over its own connection and read it to its end.

    Every failure of the server is an outcome, not an exception.
    """
    exchange = _Exchange(request, None)
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
                    exchange.response.end_of_connection(now)
                    return exchange.finished(now)
                exchange.response.feed(data, now)
            return exchange.finished(now)
    except TimeoutError:
        return exchange.failed(Ending.TIMEOUT, f"no end within {timeout_seconds:g} s")
    except (OSError, httptools.HttpParserError) as error:
        return exchange.failed(Ending.CONNECTION, f"{type(error).__name__}: {error}")


class _Connection(asyncio.Protocol):
    """TCP connection that passes bytes with their arrival time to the current response."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._exchange: _Exchange | None = None
        self._response: ResponseReader | None = None
        self._over: asyncio.Future[float] | None = None
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._response is None or self._over is None or self._over.done():
            self.close()  # unexpected bytes: the connection is out of step
            return
        try:
            self._response.feed(data, now)
        except httptools.HttpParserError as error:
            self._over.set_exception(ConnectionError(f"not HTTP: {error}"))
            return
        if self._response.complete or (self._exchange is not None and self._exchange.over):
            self._over.set_result(now)

    def connection_lost(self, exc: Exception | None) -> None:
        now = time.perf_counter()
        self.closed = True
        if self._over is None or self._over.done():
            return
        if exc is not None:
            self._over.set_exception(ConnectionError(f"{type(exc).__name__}: {exc}"))
            return
        if self._response is not None:
            self._response.end_of_connection(now)
        self._over.set_result(now)

    def close(self) -> None:
        """Close at once, as a client that disconnects does."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    async def exchange(self, payload: bytes, response: ResponseReader, exchange: _Exchange | None) -> float:
        """Send a request and wait until the response ends or the client disconnects; return that time.

        Raises:
            ConnectionError: the connection broke, or its bytes are not HTTP.
        """
        if self._transport is None or self.closed:
            raise ConnectionError("the connection is closed")
        self._response, self._exchange = response, exchange
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
        self, request: CompletionRequest, *, model: str | None, intended_seconds: float | None = None
    ) -> Outcome:
        """Send one completion and read it to its end. Every failure of the server is an outcome."""
        payload = self.target.request_bytes("POST", COMPLETIONS_PATH, request.body(model))
        exchange = _Exchange(request, intended_seconds)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return exchange.finished(await self._send(payload, exchange.response, exchange))
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

    async def _send(self, payload: bytes, response: ResponseReader, exchange: _Exchange | None) -> float:
        connection, fresh = await self._connect()
        try:
            now = await connection.exchange(payload, response, exchange)
            if response.status is None and not fresh:
                # The server closed an idle connection just as it was reused; nothing of the response had arrived.
                connection, fresh = await self._open(), True
                now = await connection.exchange(payload, response, exchange)
        except BaseException:
            connection.close()
            raise
        if response.complete and response.reusable and not connection.closed:
            self._idle.append(connection)
        else:
            connection.close()
        return now

    async def _connect(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection, False
        return await self._open(), True

    async def _open(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self.target.host, self.target.port)
        return connection
