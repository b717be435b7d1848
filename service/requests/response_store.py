"""Resumable streams and idempotent retries: response buffers that outlive a connection.

A response is buffered if its request has an `Idempotency-Key`, or accepts only `text/event-stream`. A request with
`Last-Event-ID` (WHATWG EventSource) gets the events after that id. A retry under the same `Idempotency-Key`
(draft-ietf-httpapi-idempotency-key-header) gets the same response. Any other request ends with its connection.
"""

import asyncio
import hashlib
import logging
import re
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from service.http.middleware import KEY_NAME
from service.http.request_io import TIMEOUT_HEADER, error_event, wait_for_disconnect
from service.protocol.errors import ApiError, IdempotencyKeyReused, InvalidRequest, ResponseGone
from service.protocol.responses import KEEP_ALIVE

logger = logging.getLogger(__name__)

# Buffer limit of one response: 16,000 tokens of a stream without logprobs. A longer stream keeps its latest events. A
# response that is not streamed is kept whole.
MAX_RESPONSE_BYTES: Final = 4 * 2**20
# Limit of all buffers together. Over the limit, finished buffers without readers are dropped, oldest first.
MAX_KEPT_BYTES: Final = 64 * 2**20
_OVERHEAD_BYTES: Final = 4096  # of a buffer without text
_EVENT_ID: Final = re.compile(r"([0-9a-f]{32})/(\d{1,9})")
# Beginnings of the events that end a failed stream.
_ERRORS: Final = (b'data: {"error":', b"event: error", b"event: response.failed")
_KEY: Final = re.compile(r"[!-~]{1,255}")

Make: TypeAlias = Callable[[], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """Identity of a request, which a retry must share to get the buffered response."""

    tenant: str  # name of the API key
    key: str | None  # the Idempotency-Key header
    path: str
    digest: bytes  # of the body, byte for byte
    timeout: str | None  # the x-request-timeout header, which means the same as the body's `timeout`


class BufferedResponse:
    """Buffer of one response, during its generation and for some time after. Creating it starts the generation."""

    def __init__(
        self,
        make: Make,
        identity: RequestIdentity,
        *,
        on_change: Callable[["BufferedResponse"], None],  # called when the response ends, and when a reader leaves
        waste: Callable[[int], None],  # gets the number of tokens that were generated and sent to no client
        state: dict[str, Any],  # `request.state` of the request that starts the response
        has_ids: bool = True,  # the events of a stream get ids, by which a client resumes the stream
    ) -> None:
        self.id = uuid.uuid4().hex
        self.identity = identity
        self._on_change = on_change
        self._waste = waste
        self._scope: Scope = {"type": "http", "state": state}
        self._has_ids = has_ids
        self.head: Message | None = None
        self.failure: Exception | None = None
        self.has_failed = False
        self.is_finished = False
        self.num_bytes = 0
        self.idle_since_seconds = time.monotonic()
        self._parts: deque[tuple[bytes, int]] = deque()  # each with the number of response tokens up to its end
        self._num_dropped = 0
        self._num_tokens = self._num_read_tokens = 0
        self._response: Response | None = None
        self._wakes: set[asyncio.Event] = set()
        self._abandoned = asyncio.Event()
        self._task = asyncio.create_task(self._record(make))

    @property
    def num_parts(self) -> int:
        """Number of parts of the response so far, dropped parts included. One part of a stream is one event."""
        return self._num_dropped + len(self._parts)

    def has(self, number: int) -> bool:
        """Return True if all parts from `number` on are kept. Part `number` may be the next one to arrive."""
        return self._num_dropped <= number <= self.num_parts

    @property
    def is_stream(self) -> bool:
        """True if the response is an event stream; False until the response headers are known."""
        headers = () if self.head is None else self.head["headers"]
        return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)

    @property
    def num_readers(self) -> int:
        return len(self._wakes)

    def add_reader(self, wake: asyncio.Event) -> None:
        """Register a reader's event `wake`, which is set now, when parts arrive, and when the response ends."""
        wake.set()
        self._wakes.add(wake)

    def remove_reader(self, wake: asyncio.Event) -> None:
        self._wakes.discard(wake)
        self.idle_since_seconds = time.monotonic()
        self._on_change(self)

    def read(self, start: int) -> bytes:
        """Return the parts from number `start` on, joined, as sent to a client.

        Record their tokens as read: `abandon` does not count them as wasted.

        Part `start` must still be in the buffer. Events get SSE ids if the client can resume the stream by them.
        """
        sent = [self._parts[index][0] for index in range(start - self._num_dropped, len(self._parts))]
        self._num_read_tokens = max(self._num_read_tokens, self._parts[-1][1])
        if self.is_stream and self._has_ids:
            sent = [b"id: %s/%d\n%b" % (self.id.encode(), start + number, part) for number, part in enumerate(sent)]
        return b"".join(sent)

    def abandon(self) -> None:
        """Stop the generation, as if the client had disconnected. Count tokens that no client has read as wasted."""
        if self.is_finished and not self._abandoned.is_set():
            self._waste(self._num_tokens - self._num_read_tokens)
        self._abandoned.set()

    def cancel(self) -> None:
        self._task.cancel()

    async def _record(self, make: Make) -> None:
        try:
            self._response = await make()
            await self._response(self._scope, self._receive, self._send)
        except ApiError as error:
            self.failure = error
        except Exception as error:
            logger.exception("unexpected error while generating a response that is kept for retries")
            self.failure = error
        finally:
            self.has_failed |= self.failure is not None
            self.is_finished = True
            if self._abandoned.is_set():
                self._waste(self._num_tokens - self._num_read_tokens)
            self.idle_since_seconds = time.monotonic()
            self._wake_readers()
            self._on_change(self)

    async def _receive(self) -> Message:
        await self._abandoned.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.head = message
        elif self.is_stream and message["body"] != KEEP_ALIVE:
            self._keep(message["body"].split(b"\n\n")[:-1], end=b"\n\n")
        elif not self.is_stream:
            self._keep([message["body"]] if message["body"] else [])
        self._wake_readers()

    def _keep(self, parts: list[bytes], end: bytes = b"") -> None:
        self.has_failed |= any(part.startswith(_ERRORS) for part in parts)
        self._num_tokens = getattr(self._response, "num_sent_tokens", 0)
        self._parts.extend((part + end, self._num_tokens) for part in parts)
        self.num_bytes += sum(len(part) + len(end) for part in parts)
        while self.num_bytes > MAX_RESPONSE_BYTES and self.is_stream:
            self.num_bytes -= len(self._parts.popleft()[0])
            self._num_dropped += 1

    def _wake_readers(self) -> None:
        for wake in self._wakes:
            wake.set()


class BufferedResponseReplay(Response):
    """ASGI response that sends a buffered response to one connection, from part (SSE event) number `start` on."""

    def __init__(self, buffered: BufferedResponse, *, start: int = 0, is_again: bool = True) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers()
        self._buffered = buffered
        buffered.idle_since_seconds = time.monotonic()  # it does not expire before this reader is registered
        self._next = start
        self._is_again = is_again  # an earlier request started the buffered response
        self._wake = asyncio.Event()
        self._has_gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the buffered parts of the response, then new parts as they arrive. Raises the error that ended it."""
        self._buffered.add_reader(self._wake)
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await self._replay(send)
        finally:
            watcher.cancel()
            self._buffered.remove_reader(self._wake)

    async def _watch(self, receive: Receive) -> None:
        await wait_for_disconnect(receive)
        self._has_gone = True
        self._wake.set()

    async def _replay(self, send: Send) -> None:
        buffered, has_begun, is_last = self._buffered, False, False
        while not is_last:
            await self._wake.wait()
            self._wake.clear()
            if self._has_gone:
                return
            is_last = buffered.is_finished  # if finished, the parts present now are all
            if not has_begun and buffered.head is not None:
                has_begun = True
                again = [(b"idempotent-replayed", b"true")] if self._is_again else []
                await send({**buffered.head, "headers": [*buffered.head["headers"], *again]})
            if has_begun and not await self._catch_up(send):
                break
        if buffered.failure is not None:
            raise buffered.failure
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _catch_up(self, send: Send) -> bool:
        """Send the parts that have arrived, or a keep-alive. Return False if a slow client's next part was dropped."""
        buffered = self._buffered
        if self._next == buffered.num_parts and buffered.is_stream and not buffered.is_finished:
            await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
        while self._next < buffered.num_parts and not self._has_gone:
            if not buffered.has(self._next):
                error = "the stream was read too slowly and its next events were dropped; repeat the request"
                body = error_event(ResponseGone(error), buffered.identity.path)
                await send({"type": "http.response.body", "body": body, "more_body": True})
                return False
            body = buffered.read(self._next)
            self._next = buffered.num_parts
            await send({"type": "http.response.body", "body": body, "more_body": True})
        return True


class ResponseStore:
    """Response buffers of the API process, by id and by `Idempotency-Key`.

    keep_seconds: how long a buffer without readers is kept, finished or not; 0 turns buffering off.
    count: called for each request that reads the buffer of an earlier request: "event_id" (resumed) or "key" (retried).
    waste: called with the number of tokens of a response that were sent to no client.
    """

    def __init__(self, *, keep_seconds: float, count: Callable[[str], None], waste: Callable[[int], None]) -> None:
        self._keep_seconds = keep_seconds
        self._count = count
        self._waste = waste
        self._by_id: dict[str, BufferedResponse] = {}  # in order of creation
        self._by_key: dict[tuple[str, str], BufferedResponse] = {}

    async def answer(self, request: Request, body: bytes, make: Make) -> Response:
        """Return the response to a request: the result of `make`, or a buffered response to an earlier attempt.

        Raises an `ApiError` if Last-Event-ID or Idempotency-Key is invalid, belongs to another request or has expired,
        and the errors of `make`.
        """
        key = request.headers.get("idempotency-key")
        identity = RequestIdentity(
            tenant=str(getattr(request.state, KEY_NAME, "")),
            key=key,
            path=request.url.path,
            digest=hashlib.blake2b(body, digest_size=16).digest(),
            timeout=request.headers.get(TIMEOUT_HEADER),
        )
        if event_id := request.headers.get("last-event-id", ""):
            return self._resume(event_id, identity, has_body=bool(body))
        if key is not None and not _KEY.fullmatch(key):
            raise InvalidRequest("Idempotency-Key must be 1 to 255 visible ASCII characters")
        # A client that also accepts JSON may not understand event ids, and may not have asked for a stream.
        is_event_source = request.headers.get("accept", "").strip().lower() == "text/event-stream"
        if not (key or is_event_source) or not self._keep_seconds:
            return await make()
        if key and (buffered := self._by_key.get((identity.tenant, key))) is not None:
            return self._repeat(buffered, identity)
        buffered = BufferedResponse(
            make,
            identity,
            on_change=self._discard_failed,
            waste=self._waste,
            state=request.scope.setdefault("state", {}),
        )
        self._by_id[buffered.id] = buffered
        if key:
            self._by_key[identity.tenant, key] = buffered
        return BufferedResponseReplay(buffered, is_again=False)

    def discard_expired(self) -> None:
        """Discard the buffers that have expired or exceed the memory limit. Call this method once a second."""
        since = time.monotonic() - self._keep_seconds
        for buffered in list(self._by_id.values()):
            if not buffered.num_readers and buffered.idle_since_seconds <= since:
                self._discard(buffered)
        excess = sum(each.num_bytes + _OVERHEAD_BYTES for each in self._by_id.values()) - MAX_KEPT_BYTES
        for buffered in list(self._by_id.values()):
            if excess > 0 and buffered.is_finished and not buffered.num_readers:
                excess -= buffered.num_bytes + _OVERHEAD_BYTES
                self._discard(buffered)

    def close(self) -> None:
        """Cancel the generation of all buffered responses, because the API process ends."""
        for buffered in self._by_id.values():
            buffered.cancel()

    def _resume(self, event_id: str, identity: RequestIdentity, *, has_body: bool) -> BufferedResponseReplay:
        match = _EVENT_ID.fullmatch(event_id)
        if match is None:
            raise InvalidRequest(
                "Last-Event-ID is not an event id of this server; send the id of the last event received"
            )
        buffered, start = self._by_id.get(match[1]), int(match[2]) + 1
        if buffered is None or buffered.identity.tenant != identity.tenant or not buffered.has(start):
            raise ResponseGone(
                "the events after Last-Event-ID are not stored; repeat the request without Last-Event-ID"
            )
        if identity.path != buffered.identity.path or (has_body and identity.digest != buffered.identity.digest):
            raise InvalidRequest(
                "Last-Event-ID belongs to another request; send it to that request's route, with the same body or none"
            )
        self._count("event_id")
        return BufferedResponseReplay(buffered, start=start)

    def _repeat(self, buffered: BufferedResponse, identity: RequestIdentity) -> BufferedResponseReplay:
        if identity != buffered.identity:
            raise IdempotencyKeyReused("the Idempotency-Key belongs to another request; use a new key")
        if not buffered.has(0):
            raise ResponseGone("the beginning of the response is no longer stored; use a new Idempotency-Key")
        self._count("key")
        return BufferedResponseReplay(buffered)

    def _discard_failed(self, buffered: BufferedResponse) -> None:
        """Discard the buffer of a failed response without readers, so that a retry of its request is computed anew."""
        if buffered.has_failed and not buffered.num_readers:
            self._discard(buffered)

    def _discard(self, buffered: BufferedResponse) -> None:
        buffered.abandon()
        self._by_id.pop(buffered.id, None)
        slot = (buffered.identity.tenant, buffered.identity.key or "")
        if self._by_key.get(slot) is buffered:
            del self._by_key[slot]
