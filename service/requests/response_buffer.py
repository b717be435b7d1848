"""Buffer of one response that outlives its connection, and the replay of that buffer to a client."""

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias, runtime_checkable

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from service.protocol.errors import ApiError, ResponseGone
from service.protocol.responses import KEEP_ALIVE, encode_event

logger = logging.getLogger(__name__)

# Buffer limit of one response: 16,000 tokens of a stream without logprobs. A longer stream keeps its latest events; a
# response that is not streamed is kept whole.
MAX_RESPONSE_BYTES: Final = 4 * 2**20

Make: TypeAlias = Callable[[], Awaitable[Response]]


@runtime_checkable
class CountsTokens(Protocol):
    """Response that counts the completion tokens it has sent so far."""

    @property
    def num_sent_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """Identity of a request. Only an equal request may get the buffered response."""

    path: str
    digest: bytes  # of the body, byte for byte
    timeout: str | None  # the x-request-timeout header, which means the same as the body's `timeout`


class BufferedResponse:
    """Buffer of one response, while it is generated and for some time after. Generation starts at once.

    Args:
        make: returns the ASGI response to run.
        tenant: the name of its API key.
        key: the request's `Idempotency-Key`; None without the header.
        asked: identity of the request; a different request under the same key is an error.
        ended: called when the response is complete or has failed.
        waste: called with the number of tokens that were generated and sent to no client.
    """

    def __init__(
        self,
        make: Make,
        *,
        tenant: str,
        key: str | None,
        asked: Asked,
        ended: Callable[["BufferedResponse"], None],
        waste: Callable[[int], None],
    ) -> None:
        self.id = uuid.uuid4().hex
        self.tenant = tenant
        self.key = key
        self.asked = asked
        self._ended = ended
        self._waste = waste
        self.head: Message | None = None
        self.failure: Exception | None = None
        self.has_failed = False
        self.is_finished = False
        self.num_bytes = 0
        self.num_readers = 0
        self.idle_since_seconds = time.monotonic()
        self._parts: deque[tuple[bytes, int]] = deque()  # each with the tokens sent up to the end of its message
        self._num_dropped = 0
        self._num_tokens = self._num_played_tokens = 0
        self._response: Response | None = None
        self._wakes: set[asyncio.Event] = set()
        self._abandoned = asyncio.Event()
        self._task = asyncio.create_task(self._record(make))

    @property
    def num_parts(self) -> int:
        """Return the number of parts so far, dropped ones included. A stream's part is one event."""
        return self._num_dropped + len(self._parts)

    def has(self, number: int) -> bool:
        """Report whether no part from `number` on has been dropped. Part `number` may be the next to come."""
        return self._num_dropped <= number <= self.num_parts

    def part(self, number: int) -> bytes:
        """Return one part as sent to a client. An event gets its id."""
        part, _ = self._parts[number - self._num_dropped]
        return b"id: %s/%d\n" % (self.id.encode(), number) + part if self.is_stream else part

    @property
    def is_stream(self) -> bool:
        """Report whether the response is an event stream; False until its headers are known."""
        headers = () if self.head is None else self.head["headers"]
        return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)

    @contextmanager
    def reader(self) -> Iterator[asyncio.Event]:
        """Register a reader. Yield an event that is set now and whenever parts arrive or the response ends."""
        wake = asyncio.Event()
        wake.set()
        self._wakes.add(wake)
        self.num_readers += 1
        try:
            yield wake
        finally:
            self._wakes.discard(wake)
            self.num_readers -= 1
            self.idle_since_seconds = time.monotonic()

    def played(self, number: int) -> None:
        """Record that a client was sent all parts before `number`."""
        if number > self._num_dropped:
            _, num_tokens = self._parts[number - self._num_dropped - 1]
            self._num_played_tokens = max(self._num_played_tokens, num_tokens)

    def abandon(self) -> None:
        """Send a client disconnect to the response, since no client came back for it."""
        is_news = not self._abandoned.is_set()
        self._abandoned.set()
        if is_news and self.is_finished:
            self._waste(self._num_tokens - self._num_played_tokens)

    def cancel(self) -> None:
        """Cancel the response, because the process ends."""
        self._task.cancel()

    async def _record(self, make: Make) -> None:
        try:
            self._response = await make()
            await self._response({"type": "http"}, self._receive, self._send)
        except ApiError as error:
            self.failure = error
        except Exception as error:
            logger.exception("a buffered response failed")
            self.failure = error
        finally:
            self.has_failed |= self.failure is not None
            self.is_finished = True
            if self._abandoned.is_set():
                self._waste(self._num_tokens - self._num_played_tokens)
            self.idle_since_seconds = time.monotonic()
            self._wake_readers()
            self._ended(self)

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
        self.has_failed |= any(part.startswith(b'data: {"error":') for part in parts)
        if isinstance(self._response, CountsTokens):
            self._num_tokens = self._response.num_sent_tokens
        self._parts.extend((part + end, self._num_tokens) for part in parts)
        self.num_bytes += sum(len(part) + len(end) for part in parts)
        while self.num_bytes > MAX_RESPONSE_BYTES and self.is_stream:
            self.num_bytes -= len(self._parts.popleft()[0])
            self._num_dropped += 1

    def _wake_readers(self) -> None:
        for wake in self._wakes:
            wake.set()


class BufferedResponseReplay(Response):
    """Response that sends a recording to one connection. The client may disconnect at any time.

    Args:
        start: number of the first part to send.
        is_again: the recording was started by an earlier request.
        left: called when this connection no longer reads the recording.
    """

    def __init__(
        self, buffered: BufferedResponse, *, start: int, is_again: bool, left: Callable[[BufferedResponse], None]
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers()
        self._buffered = buffered
        self._next = start
        self._is_again = is_again
        self._left = left
        self._has_gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the buffered parts, then new parts as they arrive.

        Raises:
            ApiError: the request failed before its response began.
        """
        buffered = self._buffered
        try:
            with buffered.reader() as wake:
                watcher = asyncio.create_task(self._watch(receive, wake))
                try:
                    await self._play(wake, send)
                finally:
                    watcher.cancel()
        finally:
            self._left(buffered)

    async def _watch(self, receive: Receive, wake: asyncio.Event) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._has_gone = True
        wake.set()

    async def _play(self, wake: asyncio.Event, send: Send) -> None:
        buffered, has_begun = self._buffered, False
        while True:
            await wake.wait()
            wake.clear()
            if self._has_gone:
                return
            is_last = buffered.is_finished  # if finished, the parts present now are all
            if not has_begun and buffered.head is not None:
                has_begun = True
                await send(self._head(buffered.head))
            if has_begun and not await self._catch_up(send):
                break
            if is_last:
                break
        if buffered.failure is not None:
            raise buffered.failure
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _head(self, head: Message) -> Message:
        again = [(b"idempotent-replayed", b"true")] if self._is_again else []
        return {**head, "headers": [*head["headers"], *again]}

    async def _catch_up(self, send: Send) -> bool:
        """Send the new parts, or a keep-alive comment if there are no new parts.

        Returns:
            False if the client read so slowly that its next parts were dropped. The stream then ends with an error.
        """
        buffered = self._buffered
        if self._next == buffered.num_parts and buffered.is_stream and not buffered.is_finished:
            await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
        while self._next < buffered.num_parts and not self._has_gone:
            if not buffered.has(self._next):
                late = encode_event(
                    ResponseGone(
                        "the stream was read too slowly and its next events were dropped; repeat the request"
                    ).body()
                )
                await send({"type": "http.response.body", "body": late, "more_body": True})
                return False
            body = b"".join(buffered.part(number) for number in range(self._next, buffered.num_parts))
            self._next = buffered.num_parts
            buffered.played(self._next)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        return True
