"""HTTP/1.1 and server-sent events, read from the socket as they arrive, with arrival times.

Ordinary clients buffer: locust's `iter_lines` waits for 1,024 bytes, so a first token is reported together with the
tenth. Here parsing does no I/O. `complete_blocking` uses plain sockets, which gevent makes cooperative for locust, and
`AsyncClient` uses asyncio.
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
import msgspec

from loadtest.client.outcome import Ending, Outcome
from loadtest.client.workload import LoadRequest

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


class CompletionReader:
    """Reader of one HTTP response to a completion, independent of the I/O driver. Bytes are fed as they arrive.

    Args:
        intended_seconds: time at which the request should be sent; None for the time of the send.

    Attributes:
        chunk_seconds: arrival of each chunk with text or token ids so far.
    """

    def __init__(self, request: LoadRequest, intended_seconds: float | None = None) -> None:
        self.request = request
        self.chunk_seconds: list[float] = []
        self.status: int | None = None
        self.complete = False
        self.reusable = False
        self.sent_seconds = time.perf_counter()
        self._intended_seconds = intended_seconds
        self._http = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._sse: SseParser | None = None
        self._content = bytearray()
        self._now = 0.0
        self._texts: list[str] = []
        self._finish_reasons: list[str] = []
        self._usage: tuple[int, int, int] | None = None  # tokens of prompt, cache and completion
        self._saw_done = False
        self._error: str | None = None
        self._broken: str | None = None

    @property
    def over(self) -> bool:
        """True if the response has ended, or if a cancelling client has the chunks after which it disconnects."""
        limit = self.request.cancel_after
        return self.complete or (limit is not None and len(self.chunk_seconds) >= limit)

    def feed(self, data: bytes, now: float) -> None:
        """Read bytes received at `now`. Raises `httptools.HttpParserError` if they are not HTTP."""
        self._now = now
        self._http.feed_data(data)

    def end_of_connection(self) -> None:
        """Handle the end of the connection, which completes a response without a declared length."""
        delimited = "content-length" in self._headers or "transfer-encoding" in self._headers
        if self.status is not None and not delimited and not self.complete:
            self.on_message_complete()
            self.reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header. Called by httptools, as are the other `on_` methods."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Store the status and detect an event stream."""
        self.status = self._http.get_status_code()
        if self._headers.get("content-type", "").startswith("text/event-stream"):
            self._sse = SseParser()

    def on_body(self, body: bytes) -> None:
        """Read a part of the body."""
        if self._sse is None:
            self._content.extend(body)
            return
        for event in self._sse.feed(body):
            self.event(event)

    def on_message_complete(self) -> None:
        """Mark the response as complete."""
        self.complete = True
        self.reusable = self._http.should_keep_alive()
        if self._sse is None:
            self._read(bytes(self._content))
            self._saw_done = True

    def event(self, data: bytes) -> None:
        """Read one event of a stream."""
        if data == b"[DONE]":
            self._saw_done = True
            return
        if self._saw_done:
            self._broken = "an event after [DONE]"
        self._read(data)

    def _read(self, data: bytes) -> None:
        try:
            completion = msgspec.json.decode(data)
            if (error := completion.get("error")) is not None:
                self._error = f"{error.get('code') or error.get('type') or 'error'}: {error.get('message', '')}"
            if (usage := completion.get("usage")) is not None:
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                self._usage = int(usage["prompt_tokens"]), int(cached), int(usage["completion_tokens"])
            for choice in completion.get("choices", ()):
                text = str(choice.get("text") or "")
                self._texts.append(text)
                if self._sse is not None and (text or choice.get("token_ids")):
                    self.chunk_seconds.append(self._now)
                if choice.get("finish_reason") is not None:
                    self._finish_reasons.append(choice["finish_reason"])
        except (msgspec.DecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
            self._broken = f"not a completion: {error}"

    def finished(self, now: float) -> Outcome:
        """Return the outcome once `over`, or at the end of the connection."""
        return self.ended(*self._judge(), now)

    def ended(self, ending: Ending, detail: str, now: float | None = None) -> Outcome:
        """Return the outcome of a request with this ending. A stream cut short counts a token per chunk of text."""
        prompt_tokens, cached_tokens, completion_tokens = self._usage or (0, 0, len(self.chunk_seconds))
        retry_after = self._headers.get("retry-after", "")  # a date counts as 0 seconds
        return Outcome(
            index=self.request.index,
            client=self.request.client,
            ending=ending,
            detail=detail,
            intended_seconds=self.sent_seconds if self._intended_seconds is None else self._intended_seconds,
            sent_seconds=self.sent_seconds,
            chunk_seconds=tuple(self.chunk_seconds),
            end_seconds=time.perf_counter() if now is None else now,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            completion_tokens=completion_tokens,
            text="".join(self._texts),
            retry_after_seconds=float(retry_after) if ending is Ending.SHED and retry_after.isdecimal() else 0.0,
        )

    def _judge(self) -> tuple[Ending, str]:
        """Return the ending of the response, and its reason."""
        if not self.complete and self.over:
            return Ending.CANCELLED, ""
        if not self.complete or self.status is None:
            return Ending.CONNECTION, "the connection ended before the response"
        if self.status == 429:
            return Ending.SHED, self._error or "429"
        if self.status != 200:
            return Ending.HTTP_ERROR, f"{self.status} {self._error or self._broken or ''}".rstrip()
        if self._error is not None:
            return Ending.STREAM_ERROR, self._error
        broken = self._broken or self._contract_breach()
        return (Ending.OK, "") if broken is None else (Ending.CONTRACT, broken)

    def _contract_breach(self) -> str | None:
        """Return the way in which a finished completion breaks the API contract, or None."""
        if not self._saw_done:
            return "a stream without [DONE]"
        if len(self._finish_reasons) != 1:
            return f"{len(self._finish_reasons)} finish reasons"
        if self._usage is None:
            return "no usage"
        count, wanted = self._usage[2], self.request.max_tokens
        if count > wanted:
            return f"{count} tokens where at most {wanted} were asked for"
        if self._finish_reasons[0] == "length" and count < wanted:
            return f"finish reason length after {count} of {wanted} tokens"
        return None


def complete_blocking(target: Target, request: LoadRequest, *, model: str | None, timeout_seconds: float) -> Outcome:
    """Send one completion over its own connection and read it to its end. Every failure is an outcome."""
    reader = CompletionReader(request)
    deadline = reader.sent_seconds + timeout_seconds
    payload = target.request_bytes("POST", COMPLETIONS_PATH, request.body(model), keep_alive=False)
    try:
        with socket.create_connection((target.host, target.port), timeout=timeout_seconds) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(payload)
            now = time.perf_counter()
            while not reader.over:
                connection.settimeout(max(1e-3, deadline - now))
                data = connection.recv(RECEIVE_BYTES)
                now = time.perf_counter()
                if not data:
                    reader.end_of_connection()
                    break
                reader.feed(data, now)
            return reader.finished(now)
    except TimeoutError:
        return reader.ended(Ending.TIMEOUT, f"no end within {timeout_seconds:g} s")
    except (OSError, httptools.HttpParserError) as error:
        return reader.ended(Ending.CONNECTION, f"{type(error).__name__}: {error}")


class _Connection(asyncio.Protocol):
    """TCP connection that passes bytes with their arrival time to the current reader."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reader: CompletionReader | None = None
        self._over: asyncio.Future[float] | None = None
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._reader is None or self._over is None or self._over.done():
            self.close()  # unexpected bytes: the connection is out of step
            return
        try:
            self._reader.feed(data, now)
        except httptools.HttpParserError as error:
            self._over.set_exception(ConnectionError(f"not HTTP: {error}"))
            return
        if self._reader.over:
            self._over.set_result(now)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._reader is None or self._over is None or self._over.done():
            return
        if exc is not None:
            self._over.set_exception(ConnectionError(f"{type(exc).__name__}: {exc}"))
            return
        self._reader.end_of_connection()
        self._over.set_result(time.perf_counter())

    def close(self) -> None:
        """Close at once, as a client that disconnects does."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    async def send(self, payload: bytes, reader: CompletionReader) -> float:
        """Send a request and wait until the response ends or the client disconnects; return that time.

        Raises:
            ConnectionError: the connection broke, or its bytes are not HTTP.
        """
        if self._transport is None or self.closed:
            raise ConnectionError("the connection is closed")
        self._reader, self._over = reader, asyncio.get_running_loop().create_future()
        self._transport.write(payload)
        return await self._over


class AsyncClient:
    """Client for completions over kept-alive connections, without a limit on concurrency."""

    def __init__(self, target: Target, *, timeout_seconds: float = 120.0) -> None:
        self.target = target
        self._timeout_seconds = timeout_seconds
        self._idle: list[_Connection] = []

    async def complete(
        self, request: LoadRequest | CompletionReader, *, model: str | None, intended_seconds: float | None = None
    ) -> Outcome:
        """Send one completion and read it to its end. Every failure of the server is an outcome.

        A caller that passes a reader sees the chunks of the stream while they arrive.
        """
        reader = request if isinstance(request, CompletionReader) else CompletionReader(request, intended_seconds)
        payload = self.target.request_bytes("POST", COMPLETIONS_PATH, reader.request.body(model))
        reader.sent_seconds = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return reader.finished(await self._send(payload, reader))
        except TimeoutError:
            return reader.ended(Ending.TIMEOUT, f"no end within {self._timeout_seconds:g} s")
        except OSError as error:
            return reader.ended(Ending.CONNECTION, f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        """Close the idle connections. Other connections close when their requests end."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # let the transports run their closing callbacks

    async def _send(self, payload: bytes, reader: CompletionReader) -> float:
        self._idle = [connection for connection in self._idle if not connection.closed]
        is_fresh = not self._idle
        connection = await self._open() if is_fresh else self._idle.pop()
        try:
            try:
                now = await connection.send(payload, reader)
            except ConnectionError:
                if is_fresh or reader.status is not None:
                    raise
            if reader.status is None and not is_fresh:
                # The server closed an idle connection just as it was reused; nothing of the response had arrived.
                connection = await self._open()
                now = await connection.send(payload, reader)
        except BaseException:
            connection.close()
            raise
        if reader.complete and reader.reusable and not connection.closed:
            self._idle.append(connection)
        else:
            connection.close()
        return now

    async def _open(self) -> _Connection:
        create = asyncio.get_running_loop().create_connection
        _, connection = await create(_Connection, self.target.host, self.target.port)
        return connection
