"""HTTP/1.1 protocol of a client connection: uvicorn's httptools protocol with limits on size, time and connections.

Pipelined requests are served in order: bytes after a complete request are parsed only after its response. A rejected
request gets its error after the responses to earlier requests, and the connection is closed.
"""

import asyncio
import fcntl
import logging
import math
import resource
import termios
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from threading import Semaphore
from types import SimpleNamespace
from typing import Any, Final

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from service.config.settings import SettingsError
from service.http.request_io import TIMEOUT_HEADER, error_body, keep_error
from service.protocol.errors import (
    ApiError,
    HeadTooLarge,
    InvalidRequest,
    RequestTimeout,
    TooManyConnections,
    UnsupportedEncoding,
)
from service.protocol.responses import encode

logger = logging.getLogger(__name__)

# Open files that are not connections: an idle process has fewer than 40, including libraries.
RESERVED_FILES: Final = 64
_MIN_CONNECTIONS: Final = 16
MAX_LINGERING: Final = 1024  # connections at once
LINGER_SECONDS: Final = 1.0
MAX_LINGER_BYTES: Final = 64 * 2**20  # discarded bytes of a connection
MIN_IDLE_SECONDS: Final = 1.0  # the first request of a newer connection may be on its way
# nginx accepts 32 KiB by default, and browsers send fewer than 100 fields.
MAX_HEAD_BYTES: Final = 64 * 1024
MAX_HEADERS: Final = 100
_HEAD_TOO_LARGE: Final = f"the header fields are over the limit of {MAX_HEADERS} fields or {MAX_HEAD_BYTES} bytes"
# Unparsed bytes of a connection at which reading pauses. While reading is paused, a disconnect goes unnoticed.
MAX_AHEAD_BYTES: Final = 64 * 1024
# Bytes parsed at a time. The shortest request has 18 bytes, so at most 57 requests are parsed before a response.
_PARSED_BYTES: Final = 1024
MIN_BODY_BYTES_PER_SECOND: Final = 10_000  # slowest accepted upload of a body
# Limit of chunked framing (chunk sizes, trailer fields): this factor times the body, plus `MAX_HEAD_BYTES`.
MAX_FRAMING_RATIO: Final = 8
# Fields that may occur only once. Of two values, a proxy in front may have used the other one.
_SINGLE: Final = frozenset(
    {b"host", b"content-encoding", b"idempotency-key", b"last-event-id", TIMEOUT_HEADER.encode()}
)
MIN_READ_BYTES: Final = 16 * 1024  # bytes of a response that a slow client must read within each time limit
_BEGINNING: Final = b"HTTP/1.1 "  # of every response, whatever its status
# Pause after the first probe byte, longer than a round trip within a network. Each further pause is four times as long,
# so the nine bytes of the beginning last 219 s.
_FIRST_PAUSE_SECONDS: Final = 0.01
_PAUSE_GROWTH: Final = 4.0
_BODY_EXTENSION: Final = "kvasir.chunked_body"


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionLimits:
    """Limits of the client connections of the server."""

    max_connections: int = 1280  # a further connection closes the longest-idle connection, or is rejected
    client_seconds: float = 30.0  # time limit for a head, a body (plus 1 s per 10 kB), each 16 KiB of a response
    max_body_bytes: int = 2 * 2**20  # above this size, a body gets no additional time
    linger_slots: Semaphore = field(default_factory=lambda: Semaphore(0))  # free slots of `LingeringClose`


def limit_connections(wanted: int) -> tuple[int, int]:
    """Raise this process's soft limit of open files, for `wanted` connections and `MAX_LINGERING` lingering ones.

    Return how many connections the limit allows, and how many may linger beyond them.

    Without this bound, a process at its limit of open files would be woken again and again for each connection that
    it cannot accept. Raises SettingsError: the limit leaves no room for connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + RESERVED_FILES
    best = needed + MAX_LINGERING
    if soft < best and soft != resource.RLIM_INFINITY:
        soft = best if hard == resource.RLIM_INFINITY else min(best, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    number = wanted if soft == resource.RLIM_INFINITY else min(wanted, soft - RESERVED_FILES)
    if number < min(wanted, _MIN_CONNECTIONS):
        raise SettingsError(
            f"this process may have only {soft} files open, which leaves no room for client connections; "
            f"raise the limit (ulimit -n) to {needed}"
        )
    if number < wanted:
        logger.warning(
            "at most %d client connections, not %d: this process may have only %d files open; raise ulimit -n",
            number,
            wanted,
            soft,
        )
    return number, MAX_LINGERING if soft == resource.RLIM_INFINITY else min(MAX_LINGERING, max(0, soft - needed))


@dataclass(frozen=True, slots=True)
class ChunkedBody:
    """Streaming response body for direct writes that bypass ASGI's `send`, in chunked encoding (RFC 9112, 7.1).

    With `send`, each token of a stream wakes a task and passes through about 20 coroutines of routes and middleware,
    which doubles the cost of a token.
    """

    _cycle: RequestResponseCycle

    @property
    def is_writable(self) -> bool:
        """True while the body has begun and not ended, the client is connected, and the send buffer has room."""
        cycle = self._cycle
        if not (cycle.response_started and cycle.chunked_encoding) or cycle.response_complete:
            return False
        return not (cycle.disconnected or cycle.flow.write_paused or cycle.transport.is_closing())

    def write(self, part: bytes) -> None:
        """Write a non-empty part of the body as one chunk. Only while `is_writable`; else use `send`, which waits."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


def chunked_body(scope: Scope) -> ChunkedBody | None:
    """Return the writer that bypasses ASGI's `send`. None for a `BufferedResponse`, and under any other HTTP server."""
    body: ChunkedBody | None = scope.get("extensions", {}).get(_BODY_EXTENSION)
    return body


class HalfCloseProbe(asyncio.Transport):
    """Transport that probes whether a client still waits: sends the first bytes of its response early, one at a time.

    A client that closes only its sending side (`nc -N`) waits for the response (RFC 9112, 9.6). A client that closes
    the whole connection does not, but TCP sends the same FIN for both. The host of a closed connection answers data
    with a reset, and the next write fails. Two bytes detect a closed connection; through a TCP proxy, four bytes do.
    """

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._cycle = cycle
        self._loop = loop
        self._transport = cycle.transport
        self._num_sent = 0
        self._timer: asyncio.TimerHandle | None = None
        cycle.transport = self
        self._probe(_FIRST_PAUSE_SECONDS)

    def write(self, data: Any) -> None:
        """Stop probing, and write `data`, the beginning of the response, without the bytes that were sent as probes."""
        self.stop()
        self._cycle.transport = self._transport
        self._transport.write(data[self._num_sent :])

    def close(self) -> None:
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _probe(self, pause_seconds: float) -> None:
        if self._num_sent < len(_BEGINNING) and not self._transport.is_closing():
            self._transport.write(_BEGINNING[self._num_sent : self._num_sent + 1])
            self._num_sent += 1
            self._timer = self._loop.call_later(pause_seconds, self._probe, pause_seconds * _PAUSE_GROWTH)


class LingeringClose(asyncio.Protocol):
    """Protocol of a connection after its last response: discards bytes until the client closes (RFC 9112, 9.6).

    After a close with unread bytes, the kernel sends a reset, and the client may lose the response.
    """

    def __init__(self, transport: asyncio.Transport, slots: Semaphore, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._slots, self._num_bytes = transport, slots, 0
        self._timer = loop.call_later(LINGER_SECONDS, transport.abort)
        transport.set_protocol(self)
        transport.write_eof()

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes > MAX_LINGER_BYTES:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._slots.release()


class _HeldFlow(FlowControl):
    """uvicorn's flow control with a hold: while `is_held`, a route that reads a body does not resume socket reads."""

    is_held = False

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()

    def hold(self, is_held: bool) -> None:
        was_held, self.is_held = self.is_held, is_held
        if is_held:
            self.pause_reading()
        elif was_held:
            self.resume_reading()


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol of one client connection, with limits.

    count: gets the error of each request that the protocol rejects.
    report: gets the error of each rejected request that no route has seen.
    """

    def __init__(
        self,
        *args: Any,
        limits: ConnectionLimits,
        count: Callable[[ApiError], None],
        report: Callable[[ApiError], None] = lambda error: None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._count, self._report = count, report
        self._is_in_head = self._is_in_body = False  # part of the request that is being received
        self._num_head_bytes = 0  # received of an incomplete head
        self._num_body_bytes = 0  # received of this request's body
        self._num_framed_bytes = 0  # received since the head's end
        self._has_passed_head = False  # a head ended in the piece being parsed
        self._num_missing_bytes = 0  # not yet received of this request's body, by Content-Length
        self._unparsed = bytearray()
        self._has_client_ended = False  # closed its sending side
        self._probe: HalfCloseProbe | None = None
        self._due: ApiError | None = None  # sent after the pending responses
        self._refusal: ApiError = InvalidRequest("the request is not valid HTTP/1.1, or incomplete")
        self._cycles: list[RequestResponseCycle] = []  # requests, some with complete responses
        self._waiting_since: float | None = None  # time since which the connection waits for the client to send
        self._closable_at = math.inf  # time from which this connection may be closed for a new one
        self._behind: tuple[int, float] | None = None  # unsent bytes, and the time at which they were measured
        self._check: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Handle a new connection. Over the limit of connections, close the longest-idle one, or reject the new one."""
        super().connection_made(transport)
        self.flow: _HeldFlow = _HeldFlow(transport)
        self._waiting_since = self.loop.time()
        self._closable_at = self._waiting_since + MIN_IDLE_SECONDS
        self._check = self.loop.call_later(self._limits.client_seconds / 4, self._check_client)
        if len(self.connections) > self._limits.max_connections and not self._make_room():
            message = f"all {self._limits.max_connections} connections are in use; try again later"
            self._refuse(TooManyConnections(message, retry_after_seconds=1.0))

    def connection_lost(self, exc: Exception | None) -> None:
        """Mark all requests of an ended connection as disconnected. uvicorn marks only the last request."""
        if self._check is not None:
            self._check.cancel()
        if self._probe is not None:
            self._probe.stop()
        self._unparsed.clear()
        super().connection_lost(exc)
        for cycle in self._unanswered():
            cycle.disconnected, cycle.waiting_for_100_continue = True, False
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Parse bytes from the client. Bytes after a rejected request are dropped."""
        self._unset_keepalive_if_required()
        if self.transport.is_closing() or self._due is not None:
            return
        self._unparsed += data
        self._parse()

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio keeps the connection open on True
        """Handle the end of the client's sending side. Return True to keep the connection, if a response is due."""
        self._has_client_ended = self.flow.is_held = True
        self._parse()
        return not self.transport.is_closing()

    def on_response_complete(self) -> None:
        if self not in self.connections:
            return  # the connection lingers
        super().on_response_complete()
        self._closable_at = self.loop.time()
        if self.transport.is_closing():
            return
        if self._due is not None and not self._unanswered():
            self._send_refusal(self._due)
            return
        if self._unparsed:
            self._unset_keepalive_if_required()
        self._parse()

    def _parse(self) -> None:
        while self._unparsed and not (self.is_busy or self.transport.is_closing()):
            # A body is parsed only up to its end, so that the next request waits for the response.
            num_bytes = self._num_missing_bytes if self._num_missing_bytes > 0 else _PARSED_BYTES
            piece = bytes(self._unparsed[:num_bytes])
            del self._unparsed[:num_bytes]
            was_in_body, self._has_passed_head = self._is_in_body, False
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as upgrade:
                self._stay_with_http_1(piece[upgrade.args[0] :])
            except httptools.HttpParserError:
                self._refuse(self._refusal)
            else:
                self._bound_bytes(len(piece), was_in_body=was_in_body)
        if self._has_client_ended:
            self._end_requests()
        else:
            self.flow.hold(len(self._unparsed) > MAX_AHEAD_BYTES)

    def _end_requests(self) -> None:
        """Close a half-closed connection after the response to its last complete request; until then, probe it."""
        if not (self._unparsed or self.transport.is_closing()):
            self._drop_incomplete()
            if not self.is_busy:
                self.transport.close()
            elif self._due is None:
                self._unanswered()[-1].keep_alive = False
        if (unanswered := self._unanswered()) and not self.transport.is_closing():
            cycle = unanswered[0]
            if not cycle.response_started and cycle.transport is self.transport:
                self._probe = HalfCloseProbe(cycle, self.loop)

    def _drop_incomplete(self) -> None:
        """Drop the incomplete request that is being received. Earlier requests of the connection are unaffected."""
        self._is_in_head = self._is_in_body = False
        self._waiting_since = None
        if self.pipeline and self.pipeline[0][0].more_body:
            cycle, _ = self.pipeline.popleft()
            self._cycles.remove(cycle)

    def _bound_bytes(self, num_bytes: int, *, was_in_body: bool) -> None:
        """Count `num_bytes` received; reject a request whose head, or chunk sizes and trailers, exceed a limit."""
        if was_in_body and self._is_in_body:
            self._num_framed_bytes += num_bytes
            if self._num_framed_bytes > MAX_HEAD_BYTES + (1 + MAX_FRAMING_RATIO) * self._num_body_bytes:
                self._refuse(self._refusal)
        elif self._is_in_head and not (was_in_body or self._has_passed_head):
            self._num_head_bytes += num_bytes
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(HeadTooLarge(_HEAD_TOO_LARGE))
        elif self._waiting_since is None and not self._unanswered():
            self._waiting_since = self.loop.time()  # empty lines before a request

    def _stay_with_http_1(self, rest: bytes) -> None:
        """Continue as if the client had not offered another protocol (RFC 9110, 7.8 allows this).

        Java's client offers HTTP/2 with every first request. The parser would treat the body as data of the other
        protocol, so a new parser gets the head again without the Upgrade field.
        """
        fields = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        line = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        self.parser = httptools.HttpRequestParser(self)
        self._unparsed[:0] = b"\r\n".join([line, *fields, b"", rest])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._num_head_bytes, self._num_missing_bytes = True, 0, 0
        self._waiting_since = self.loop.time()
        self._closable_at = self._waiting_since + MIN_IDLE_SECONDS

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header field. Trailer fields are dropped, since a route would take a trailer field for a header."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check the head of a request and start its route. An exception ends the parsing and rejects the request."""
        self._is_in_head, self._is_in_body, self._has_passed_head = False, True, True
        self._num_body_bytes, self._num_framed_bytes, self._waiting_since = 0, 0, self.loop.time()
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._refusal = HeadTooLarge(_HEAD_TOO_LARGE)
            raise ValueError("the head of the request is too large")
        if any(name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in self.headers):
            self._refusal = UnsupportedEncoding(
                "Transfer-Encoding is not supported, except chunked; send the body chunked or with Content-Length"
            )
            raise ValueError("the request body has an unsupported Transfer-Encoding")
        names = [name for name, _ in self.headers]
        if len(set(names)) < len(names) and (twice := min((n for n in _SINGLE if names.count(n) > 1), default=b"")):
            name = twice.decode()
            self._refusal = InvalidRequest(f"the header {name} occurs twice; send one value", param=name)
            raise ValueError("the request has a single-value header field twice")
        if self._offers_another_protocol():
            return
        self._num_missing_bytes = int(dict(self.headers).get(b"content-length", b"0"))
        self._cycles = self._unanswered()
        super().on_headers_complete()
        if self.parser.get_http_version() != "1.1":
            _speak_http_1_0(self.cycle)
        extensions: dict[str, Any] = {_BODY_EXTENSION: ChunkedBody(self.cycle)}
        self.scope["extensions"] = extensions
        self._cycles.append(self.cycle)
        # For a response that ends before the request does. `on_message_complete` restores the transport.
        write, is_closing = self.transport.write, self.transport.is_closing
        self.cycle.transport = SimpleNamespace(write=write, is_closing=is_closing, close=self._close)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        self._num_missing_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_body, self._waiting_since = False, None
        if not self._offers_another_protocol():
            self.cycle.transport = self.transport
            super().on_message_complete()
            if not self.cycle.response_complete:
                self._closable_at = math.inf

    def _offers_another_protocol(self) -> bool:
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("CONNECT is not supported: this server is not a proxy")
        return bool(self.parser.should_upgrade())

    def _should_upgrade_to_ws(self) -> bool:
        return False

    def _unanswered(self) -> list[RequestResponseCycle]:
        return [cycle for cycle in self._cycles if not cycle.response_complete]

    def _refuse(self, error: ApiError) -> None:
        """Reject the request being received: send `error` after the responses to earlier requests, then disconnect."""
        if self._due is not None:
            return
        self._count(error)
        unanswered = self._unanswered()
        is_one_incomplete = bool(unanswered) and unanswered[-1].more_body
        if len(unanswered) == is_one_incomplete == 1:
            keep_error(unanswered[0].scope, error)  # type: ignore[arg-type]  # uvicorn's TypedDict
        else:
            self._report(error)
        if len(unanswered) > is_one_incomplete:
            self._due = error
            self._unparsed.clear()
            self._drop_incomplete()
        elif is_one_incomplete and unanswered[-1].response_started:
            self.transport.abort()  # its response has begun, so no error can be sent
        else:
            self._send_refusal(error, unanswered[-1].scope if is_one_incomplete else None)

    def _send_refusal(self, error: ApiError, scope: Any = None) -> None:
        body = encode(error.body() if scope is None else error_body(error, scope))
        fields = {"content-type": "application/json", "content-length": str(len(body)), **error.headers()}
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in {**fields, "connection": "close"}.items())
        self.transport.write(f"{head}\r\n".encode() + body)
        self._close()

    def _close(self) -> None:
        """Close the connection. While the client may still be sending, linger, so that it gets the last response."""
        self._unset_keepalive_if_required()
        # A client that reads slowly needs more time than `LINGER_SECONDS`.
        is_slow = self.transport.get_write_buffer_size() > MIN_READ_BYTES
        can_linger = not (is_slow or self._has_client_ended or self.transport.is_closing())
        if can_linger and self._limits.linger_slots.acquire(blocking=False):
            self.flow.hold(False)
            self.flow.resume_reading()
            self.connection_lost(ConnectionAbortedError())
            LingeringClose(self.transport, self._limits.linger_slots, self.loop)
        else:
            self.transport.close()

    def _make_room(self) -> bool:
        """Close the longest-idle other connection, and return True.

        Return False if no connection is idle for long enough, or if the longest-idle one has bytes to read.
        """
        now = self.loop.time()
        others = (each for each in self.connections if isinstance(each, BoundedHttpProtocol))
        ready = (each for each in others if each._closable_at <= now)
        idle = (each for each in ready if not (each.is_busy or each.transport.get_write_buffer_size()))
        longest = min(idle, key=lambda each: each._closable_at, default=None)
        if longest is None or longest._has_unread_bytes():
            return False
        self.connections.discard(longest)
        longest.transport.abort()
        return True

    def _has_unread_bytes(self) -> bool:
        """Return True if the kernel holds bytes of the client that the event loop, being late, has not read yet."""
        socket = None if self.transport.is_closing() else self.transport.get_extra_info("socket")
        return socket is not None and any(fcntl.ioctl(socket.fileno(), termios.FIONREAD, bytes(4)))

    @property
    def is_busy(self) -> bool:
        """True if the client has sent a complete request and waits for the response."""
        return any(not cycle.more_body for cycle in self._unanswered())

    def _check_client(self) -> None:
        """Close the connection or reject its request if the client is over a time limit. Runs periodically."""
        self._check = self.loop.call_later(self._limits.client_seconds / 4, self._check_client)
        now = self.loop.time()
        if self._is_stuck(now):
            self.transport.abort()
        elif self._is_late(now) and not self.transport.is_closing():
            if self._is_in_head or self._is_in_body:
                part = "head" if self._is_in_head else "body"
                self._refuse(RequestTimeout(f"the request's {part} took too long to arrive; send it again"))
            else:
                self.transport.close()

    def _is_late(self, now: float) -> bool:
        if self._waiting_since is None:
            return False
        if self.flow.read_paused or self._unparsed:  # the server makes the client wait
            self._waiting_since = now
        num_bytes = min(self._num_body_bytes, self._limits.max_body_bytes) if self._is_in_body else 0
        return now - self._waiting_since > self._limits.client_seconds + num_bytes / MIN_BODY_BYTES_PER_SECOND

    def _is_stuck(self, now: float) -> bool:
        """Return True if, within the time limit, the client has read too few bytes of a response that is being sent."""
        num_bytes = self.transport.get_write_buffer_size()
        if not num_bytes or not (self.flow.write_paused or self.transport.is_closing() or not self._unanswered()):
            self._behind = None
            return False
        if self._behind is None or self._behind[0] - num_bytes >= MIN_READ_BYTES:
            self._behind = (num_bytes, now)
        return now - self._behind[1] > self._limits.client_seconds


def _speak_http_1_0(cycle: RequestResponseCycle) -> None:
    """Adapt a response to HTTP/1.0: no chunked encoding, no 100 Continue (RFC 9112, 6.1; RFC 9110, 10.1.1).

    A response without Content-Length ends with the connection, which uvicorn closes after each HTTP/1.0 response.
    """
    cycle.waiting_for_100_continue = False
    send, is_of_known_length = cycle.send, False

    async def send_to_the_end(message: Any) -> None:
        nonlocal is_of_known_length
        if message["type"] == "http.response.start":
            is_of_known_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = None if is_of_known_length else False
        elif not is_of_known_length:
            cycle.expected_content_length = len(message["body"])
        await send(message)

    cycle.send = send_to_the_end  # type: ignore[method-assign]
