"""HTTP itself, within bounds: uvicorn's protocol on httptools, which waits for a client as long as the client likes.

Bounded are a request's head (the request line and the header fields), the time that a client takes to send its request
and to take its answer, the bytes that it sends ahead, and the number of connections. A rejected request gets an error
in the shape of our errors, after the answers to the requests before it, and the connection is closed.

Pipelined requests are served in turn, any number of them. Bytes after a complete request are not parsed before it is
answered, and not read beyond `MAX_AHEAD_BYTES`. A client that closes its sending side gets the answers to all complete
requests; see `service.half_close`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from service.errors import (
    ApiError,
    HeadTooLarge,
    InvalidRequest,
    RequestTimeout,
    TooManyConnections,
    UnsupportedEncoding,
)
from service.half_close import EarlyBeginning
from service.open_body import ChunkedBody, extension
from service.queue_terms import TIMEOUT_HEADER
from service.responses import encode

# What nginx takes by default is 32 KiB, and browsers send under a hundred fields.
MAX_HEAD_BYTES: Final = 64 * 1024
MAX_HEADERS: Final = 100
# Of a connection, read and not parsed, before reading pauses. A paused connection does not show that its client leaves.
MAX_AHEAD_BYTES: Final = 64 * 1024
# Parsed at a time: the shortest request has 18 bytes, so that at most 57 are parsed before the first is answered.
_PARSED_BYTES: Final = 1024
# A body gets a second more for so many bytes of it.
BODY_BYTES_A_SECOND: Final = 10_000
# What frames a body (sizes of chunks, fields after them) may be so many times longer than it, and a head beside.
MAX_FRAMING: Final = 8
# Fields that say one thing. Of two, a proxy in front may have gone by the other.
_SINGLE: Final = frozenset(
    {b"host", b"content-encoding", b"idempotency-key", b"last-event-id", TIMEOUT_HEADER.encode()}
)
# What a client that is behind must take of its answer each time.
MIN_TAKEN_BYTES: Final = 16 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionLimits:
    """What a client may ask of a connection.

    max_connections: of all clients. One more takes the place of the connection that has waited longest for its client.
    client_seconds: for a request's head, for its body and a second more for each 10 kB of it, and for each 16 KiB of
        an answer that the client is behind with.
    max_body_bytes: no body gets more time than one of this size.
    """

    max_connections: int = 1024
    client_seconds: float = 30.0
    max_body_bytes: int = 2 * 2**20


class _HeldFlow(FlowControl):
    """uvicorn's flow control, which an application that waits for a body cannot resume while `is_held`."""

    is_held = False

    def resume_reading(self) -> None:
        """Read again, unless reading is held."""
        if not self.is_held:
            super().resume_reading()

    def hold(self) -> None:
        """Pause reading until `release`."""
        self.is_held = True
        self.pause_reading()

    def release(self) -> None:
        """Read again after `hold`."""
        if self.is_held:
            self.is_held = False
            self.resume_reading()


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. What uvicorn does, within bounds.

    Args:
        limits: the bounds.
        count: told of each refusal.
    """

    def __init__(
        self,
        *args: Any,
        limits: ConnectionLimits | None = None,
        count: Callable[[ApiError], None] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._limits = ConnectionLimits() if limits is None else limits
        self._count = count
        self._is_in_head = self._is_in_body = False
        self._num_head_bytes = 0  # received of a head that is not complete
        self._num_body_bytes = 0  # received of this request's body
        self._num_framed_bytes = 0  # received since the head's end
        self._has_passed_head = False  # in these bytes
        self._num_missing_bytes = 0  # of this request's body, by its Content-Length
        self._unparsed = bytearray()
        self._has_client_ended = False  # its sending side
        self._early: EarlyBeginning | None = None
        self._due: ApiError | None = None  # to be sent after the answers that are under way
        self._refusal: ApiError = InvalidRequest("this is not HTTP/1.1, or not whole")
        self._cycles: list[RequestResponseCycle] = []  # requests that are not answered yet
        self._waiting_since: float | None = None  # for the client to send
        self._behind: tuple[int, float] | None = None  # bytes that the client had not taken, and when that was
        self._check: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self.flow: _HeldFlow = _HeldFlow(transport)
        self._waiting_since = self.loop.time()
        if len(self.connections) > self._limits.max_connections and not self._make_room():
            number = self._limits.max_connections
            self._refuse(TooManyConnections(f"all {number} connections are in use", retry_after_seconds=1.0))
        self._check_later()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone: all its requests learn it, not only the last one."""
        if self._check is not None:
            self._check.cancel()
        if self._early is not None:
            self._early.stop()
        self._unparsed.clear()
        super().connection_lost(exc)
        for cycle in self._unanswered():
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Bytes of the client. What comes after a rejected request is dropped."""
        self._unset_keepalive_if_required()
        if self.transport.is_closing() or self._due is not None:
            return
        self._unparsed += data
        self._parse()

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio keeps open what returns True
        """Keep the connection open while answers are due to a client that has closed its sending side."""
        self._has_client_ended = self.flow.is_held = True
        self._parse()
        return not self.transport.is_closing()

    def on_response_complete(self) -> None:
        """An answer is complete: begin with the next request."""
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._due is not None and not self._unanswered():
            self._send_refusal(self._due)
            return
        if self._unparsed:
            self._unset_keepalive_if_required()
        self._parse()

    def _parse(self) -> None:
        """Parse up to the end of a request, which is answered before more is parsed."""
        while self._unparsed and not (self.is_busy or self.transport.is_closing()):
            # A body up to its end, so that what follows is parsed in its turn.
            num_bytes = self._num_missing_bytes if self._num_missing_bytes > 0 else _PARSED_BYTES
            piece = bytes(self._unparsed[:num_bytes])
            del self._unparsed[:num_bytes]
            self._feed(piece)
        if self._has_client_ended:
            if not (self._unparsed or self.transport.is_closing()):
                self._end_requests()
            self._probe_client()
        elif len(self._unparsed) > MAX_AHEAD_BYTES:
            self.flow.hold()
        else:
            self.flow.release()

    def _feed(self, piece: bytes) -> None:
        was_in_body, self._has_passed_head = self._is_in_body, False
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay_with_http_1(piece[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(self._refusal)
        else:
            self._bound_bytes(len(piece), was_in_body=was_in_body)

    def _end_requests(self) -> None:
        """No more requests come. One without its end is dropped, and the connection closes after the last answer."""
        self._drop_incomplete()
        if not self.is_busy:
            self.transport.close()
        elif self._due is None:
            self._unanswered()[-1].keep_alive = False

    def _drop_incomplete(self) -> None:
        """Forget the request that is being received, if it waits behind others."""
        self._is_in_head = self._is_in_body = False
        self._waiting_since = None
        if self.pipeline and self.pipeline[0][0].more_body:
            cycle, _ = self.pipeline.popleft()
            self._cycles.remove(cycle)

    def _probe_client(self) -> None:
        """Find out whether the client waits for an answer that has not begun."""
        unanswered = self._unanswered()
        if not unanswered or self.transport.is_closing():
            return
        cycle = unanswered[0]
        if not cycle.response_started and cycle.transport is self.transport:
            self._early = EarlyBeginning(cycle, self.loop)

    def _bound_bytes(self, num_bytes: int, *, was_in_body: bool) -> None:
        """After so many more: bound what the parser holds of a head, or of what frames a body."""
        if was_in_body and self._is_in_body:
            self._num_framed_bytes += num_bytes
            if self._num_framed_bytes > MAX_HEAD_BYTES + (1 + MAX_FRAMING) * self._num_body_bytes:
                self._refuse(self._refusal)
        elif self._is_in_head and not (was_in_body or self._has_passed_head):
            self._num_head_bytes += num_bytes
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(_head_too_large())
        elif self._waiting_since is None and not self._unanswered():
            self._waiting_since = self.loop.time()  # empty lines before a request

    def _stay_with_http_1(self, rest: bytes) -> None:
        """Go on as if the client had not offered another protocol.

        A server may do so. The parser would take the body for that protocol's, and Java's client offers HTTP/2 with
        every first request.
        """
        fields = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        line = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        self.parser = httptools.HttpRequestParser(self)
        self._unparsed[:0] = b"\r\n".join([line, *fields, b"", rest])

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._is_in_head, self._num_head_bytes, self._num_missing_bytes = True, 0, 0
        self._waiting_since = self.loop.time()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head. Those after a body's chunks are dropped: they must not pass for the head's."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head's end. What is raised here ends the parsing."""
        self._is_in_head, self._is_in_body, self._has_passed_head = False, True, True
        self._num_body_bytes, self._num_framed_bytes, self._waiting_since = 0, 0, self.loop.time()
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._refusal = _head_too_large()
            raise ValueError("the head is too large")
        if any(name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in self.headers):
            self._refusal = UnsupportedEncoding("the only Transfer-Encoding that this server reads is chunked")
            raise ValueError("a body in another encoding")
        names = [name for name, _ in self.headers]
        if len(set(names)) < len(names) and (twice := {name for name in _SINGLE if names.count(name) > 1}):
            self._refusal = InvalidRequest(f"{min(twice).decode()} came twice; send it once", param=min(twice).decode())
            raise ValueError("a field that says two things")
        if self._offers_another_protocol():
            return
        self._num_missing_bytes = int(dict(self.headers).get(b"content-length", b"0"))
        self._cycles = self._unanswered()
        super().on_headers_complete()
        if self.parser.get_http_version() != "1.1":
            _speak_http_1_0(self.cycle)
        self.scope["extensions"] = extension(ChunkedBody(self.cycle))
        self._cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._num_body_bytes += len(body)
        self._num_missing_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The body's end."""
        self._is_in_body, self._waiting_since = False, None
        if not self._offers_another_protocol():
            super().on_message_complete()

    def _offers_another_protocol(self) -> bool:
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("this is no proxy")
        return bool(self.parser.should_upgrade())

    def _should_upgrade_to_ws(self) -> bool:
        return False

    def _unanswered(self) -> list[RequestResponseCycle]:
        return [cycle for cycle in self._cycles if not cycle.response_complete]

    def _refuse(self, error: ApiError) -> None:
        """Reject the request that is being received, after the answers to those before it, and close."""
        if self._due is not None:
            return
        if self._count is not None:
            self._count(error)
        unanswered = self._unanswered()
        is_one_incomplete = bool(unanswered) and unanswered[-1].more_body
        if len(unanswered) > is_one_incomplete:
            self._due = error
            self._unparsed.clear()
            self._drop_incomplete()
        elif is_one_incomplete and unanswered[-1].response_started:
            self.transport.abort()  # another answer to it is under way
        else:
            self._send_refusal(error)

    def _send_refusal(self, error: ApiError) -> None:
        body = encode(error.body())
        fields = {"content-type": "application/json", "content-length": str(len(body)), **error.headers()}
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in {**fields, "connection": "close"}.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()

    # Clients that let us wait.

    def _make_room(self) -> bool:
        """Close the connection that has waited longest for its client; False where every client waits for us."""
        others = (each for each in self.connections if isinstance(each, BoundedHttpProtocol) and each is not self)
        idle = [each for each in others if not each.is_busy]
        if not idle:
            return False
        longest = min(idle, key=lambda each: each.idle_since)
        self.connections.discard(longest)
        longest.transport.abort()
        return True

    @property
    def is_busy(self) -> bool:
        """Whether a client waits for an answer, having sent all of its request."""
        return any(not cycle.more_body for cycle in self._unanswered())

    @property
    def idle_since(self) -> float:
        """When it became the client's turn; for ever ago where the last answer was complete."""
        return 0.0 if self._waiting_since is None else self._waiting_since

    def _check_later(self) -> None:
        self._check = self.loop.call_later(self._limits.client_seconds / 4, self._check_client)

    def _check_client(self) -> None:
        """Now and then: whether it is still worth waiting for this client."""
        now = self.loop.time()
        if self._is_stuck(now):
            self.transport.abort()
        elif self._is_late(now) and not self.transport.is_closing():
            if self._is_in_head or self._is_in_body:
                part = "head" if self._is_in_head else "body"
                self._refuse(RequestTimeout(f"the request's {part} took too long to arrive; send it again"))
            else:
                self.transport.close()
        self._check_later()

    def _is_late(self, now: float) -> bool:
        """Whether the client has had its time to send."""
        if self._waiting_since is None:
            return False
        if self.flow.read_paused or self._unparsed:  # we let the client wait
            self._waiting_since = now
        num_bytes = min(self._num_body_bytes, self._limits.max_body_bytes) if self._is_in_body else 0
        return now - self._waiting_since > self._limits.client_seconds + num_bytes / BODY_BYTES_A_SECOND

    def _is_stuck(self, now: float) -> bool:
        """Whether the client has had its time to take what is written, be it what holds up the writer or the last."""
        num_bytes = self.transport.get_write_buffer_size()
        is_due = self.flow.write_paused or self.transport.is_closing() or not self._unanswered()
        if not num_bytes or not is_due:
            self._behind = None
            return False
        if self._behind is None or self._behind[0] - num_bytes >= MIN_TAKEN_BYTES:
            self._behind = (num_bytes, now)
        return now - self._behind[1] > self._limits.client_seconds


def _speak_http_1_0(cycle: RequestResponseCycle) -> None:
    """Answer one that knows no chunks and waits for no 100 (RFC 9112, 6.1; RFC 9110, 10.1.1).

    An answer of no known length ends with the connection, which uvicorn closes behind every answer to HTTP/1.0.
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


def _head_too_large() -> HeadTooLarge:
    return HeadTooLarge(
        f"the request's header fields are over the limit of {MAX_HEADERS} fields or {MAX_HEAD_BYTES} bytes"
    )
