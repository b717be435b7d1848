"""Answers that outlive a connection: who lost it comes back for the rest, or asks again and gets the same answer.

A request with an `Idempotency-Key`, or of a client that reads nothing but event streams, is answered beside its
connection. What is sent is kept, and every connection that asks for it reads from there: the first, the one after it
that says which event it saw last (`Last-Event-ID`, the WHATWG's EventSource), and the retry under the same key (the
IETF's draft-ietf-httpapi-idempotency-key-header), which does not generate twice.

Other requests end with their connection. Their events have no ids, which some clients take for a part of the data.
"""

import asyncio
import hashlib
import logging
import re
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from service.access import KEY_NAME
from service.errors import AnswerGone, ApiError, InvalidRequest, KeyReused
from service.queue_terms import TIMEOUT_HEADER
from service.responses import KEEP_ALIVE, encode_event

logger = logging.getLogger(__name__)

# Of one answer: 16,000 tokens of a stream without log-probabilities. Of a longer one the last are kept.
MAX_ANSWER_BYTES: Final = 4 * 2**20
# Of all answers. Beyond that none is kept that is finished and not being read.
MAX_KEPT_BYTES: Final = 64 * 2**20
_OVERHEAD_BYTES: Final = 4096  # of an answer of no text
_EVENT_ID: Final = re.compile(r"([0-9a-f]{32})/(\d{1,9})")
_KEY: Final = re.compile(r"[!-~]{1,255}")

Make = Callable[[], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, as far as it must be the same to get the same answer."""

    path: str
    digest: bytes  # of the body, byte for byte
    timeout: str | None  # the header that says as much as the body's field


class Recording:
    """One answer while it is made, and for a while after. It begins at once.

    Args:
        make: gives the response, which is called as a server calls it.
        owner: whose API key came with the request.
        key: the request's `Idempotency-Key`, None without one.
        asked: what was asked for; anything else under the same key is a mistake.
        ended: told when nothing more comes.
    """

    def __init__(
        self, make: Make, *, owner: str, key: str | None, asked: "Asked", ended: Callable[["Recording"], None]
    ) -> None:
        self.id = uuid.uuid4().hex
        self.owner = owner
        self.key = key
        self.asked = asked
        self._ended = ended
        self.head: Message | None = None
        self.failure: Exception | None = None
        self.has_failed = False
        self.is_finished = False
        self.num_bytes = 0
        self.num_readers = 0
        self.idle_since_seconds = time.monotonic()
        self._parts: deque[bytes] = deque()
        self._num_dropped = 0
        self._wakes: set[asyncio.Event] = set()
        self._abandoned = asyncio.Event()
        self._task = asyncio.create_task(self._record(make))

    @property
    def num_parts(self) -> int:
        """How many there have been: of a stream events, of a body one."""
        return self._num_dropped + len(self._parts)

    def has(self, number: int) -> bool:
        """Whether all from this part on is here, or still to come."""
        return self._num_dropped <= number <= self.num_parts

    def part(self, number: int) -> bytes:
        """One part as it goes to a client; an event with its id."""
        part = self._parts[number - self._num_dropped]
        return b"id: %s/%d\n" % (self.id.encode(), number) + part if self.is_stream else part

    @property
    def is_stream(self) -> bool:
        """Known when the head is."""
        headers = () if self.head is None else self.head["headers"]
        return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)

    @contextmanager
    def reader(self) -> Iterator[asyncio.Event]:
        """Read from here; the event is set when there is news."""
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

    def abandon(self) -> None:
        """Nobody comes back: the response learns that its client has gone."""
        self._abandoned.set()

    def cancel(self) -> None:
        """End it with the process."""
        self._task.cancel()

    async def _record(self, make: Make) -> None:
        try:
            response = await make()
            await response({"type": "http"}, self._receive, self._send)
        except ApiError as error:
            self.failure = error
        except Exception as error:
            logger.exception("an answer could not be made")
            self.failure = error
        finally:
            self.has_failed |= self.failure is not None
            self.is_finished = True
            self.idle_since_seconds = time.monotonic()
            self._tell()
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
        self._tell()

    def _keep(self, parts: list[bytes], end: bytes = b"") -> None:
        self.has_failed |= any(part.startswith(b'data: {"error":') for part in parts)
        self._parts.extend(part + end for part in parts)
        self.num_bytes += sum(len(part) + len(end) for part in parts)
        while self.num_bytes > MAX_ANSWER_BYTES and self.is_stream:
            self.num_bytes -= len(self._parts.popleft())
            self._num_dropped += 1

    def _tell(self) -> None:
        for wake in self._wakes:
            wake.set()


class Playback(Response):
    """A recording as the response to one connection, from part `start` on. Its client may leave at any time.

    Args:
        is_again: the answer was made, or begun, for an earlier request.
    """

    def __init__(self, recording: Recording, *, start: int, is_again: bool, left: Callable[[Recording], None]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers()
        self._recording = recording
        self._next = start
        self._is_again = is_again
        self._left = left
        self._has_gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Deliver what there is, and what comes.

        Raises:
            ApiError: the request failed before anything was sent.
        """
        recording = self._recording
        try:
            with recording.reader() as wake:
                watcher = asyncio.create_task(self._watch(receive, wake))
                try:
                    await self._play(wake, send)
                finally:
                    watcher.cancel()
        finally:
            self._left(recording)

    async def _watch(self, receive: Receive, wake: asyncio.Event) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._has_gone = True
        wake.set()

    async def _play(self, wake: asyncio.Event, send: Send) -> None:
        recording, has_begun = self._recording, False
        while True:
            await wake.wait()
            wake.clear()
            if self._has_gone:
                return
            is_last = recording.is_finished  # what is there now is all
            if not has_begun and recording.head is not None:
                has_begun = True
                await send(self._head(recording.head))
            if has_begun and not await self._catch_up(send):
                break
            if is_last:
                break
        if recording.failure is not None:
            raise recording.failure
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _head(self, head: Message) -> Message:
        again = [(b"idempotent-replayed", b"true")] if self._is_again else []
        return {**head, "headers": [*head["headers"], *again]}

    async def _catch_up(self, send: Send) -> bool:
        """Send what is new, or a sign of life. False: some of it is no longer there, for a client that reads slowly."""
        recording = self._recording
        if self._next == recording.num_parts and recording.is_stream and not recording.is_finished:
            await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
        while self._next < recording.num_parts and not self._has_gone:
            if not recording.has(self._next):
                late = encode_event(AnswerGone("the stream was read too slowly: its next events are gone").body())
                await send({"type": "http.response.body", "body": late, "more_body": True})
                return False
            body = b"".join(recording.part(number) for number in range(self._next, recording.num_parts))
            self._next = recording.num_parts
            await send({"type": "http.response.body", "body": body, "more_body": True})
        return True


class Recordings:
    """The recordings of this API process, by id and by key.

    Args:
        keep_seconds: how long an answer waits for somebody to come back, unfinished or finished.
        count: told of each connection that reads an answer begun for an earlier one: "event_id" or "key".
    """

    def __init__(self, *, keep_seconds: float, count: Callable[[str], None]) -> None:
        self._keep_seconds = keep_seconds
        self._count = count
        self._by_id: dict[str, Recording] = {}  # in order of their beginning
        self._by_key: dict[tuple[str, str], Recording] = {}

    async def answer(self, request: Request, body: bytes, make: Make) -> Response:
        """The response to a request: `make`'s, or what is recorded of it.

        Raises:
            InvalidRequest: a header that can't be understood, or a key that belongs to another request.
            AnswerGone: the stream that `Last-Event-ID` names is not kept, or not from there.
        """
        key = request.headers.get("idempotency-key")
        owner = str(getattr(request.state, KEY_NAME, ""))
        digest = hashlib.blake2b(body, digest_size=16).digest()
        asked = Asked(request.url.path, digest, request.headers.get(TIMEOUT_HEADER))
        if event_id := request.headers.get("last-event-id", ""):
            return self._resume(event_id, owner, asked, has_body=bool(body))
        if key is not None and not _KEY.fullmatch(key):
            raise InvalidRequest("Idempotency-Key must be 1 to 255 visible ASCII characters")
        # An event source. Who takes JSON as well may not read ids, and may not have asked for a stream.
        is_event_source = request.headers.get("accept", "").strip().lower() == "text/event-stream"
        if not (key or is_event_source) or not self._keep_seconds:
            return await make()
        if key and (recording := self._by_key.get((owner, key))) is not None:
            return self._repeat(recording, asked)
        recording = Recording(make, owner=owner, key=key, asked=asked, ended=self._tidy)
        self._by_id[recording.id] = recording
        if key:
            self._by_key[owner, key] = recording
        return Playback(recording, start=0, is_again=False, left=self._tidy)

    def tend(self) -> None:
        """Let go of what nobody came back for. Called every second or so."""
        since = time.monotonic() - self._keep_seconds
        for recording in list(self._by_id.values()):
            if not recording.num_readers and recording.idle_since_seconds <= since:
                self._drop(recording)
        excess = sum(each.num_bytes + _OVERHEAD_BYTES for each in self._by_id.values()) - MAX_KEPT_BYTES
        for recording in [each for each in self._by_id.values() if each.is_finished and not each.num_readers]:
            if excess <= 0:
                break
            excess -= recording.num_bytes + _OVERHEAD_BYTES
            self._drop(recording)

    def close(self) -> None:
        """End with the process."""
        for recording in self._by_id.values():
            recording.cancel()

    def _resume(self, event_id: str, owner: str, asked: Asked, *, has_body: bool) -> Playback:
        match = _EVENT_ID.fullmatch(event_id)
        if match is None:
            raise InvalidRequest("Last-Event-ID is not the id of an event of this server")
        recording, start = self._by_id.get(match[1]), int(match[2]) + 1
        if recording is None or recording.owner != owner or not recording.has(start):
            raise AnswerGone("the stream is not kept, or not from that event on; ask again without Last-Event-ID")
        if asked.path != recording.asked.path or (has_body and asked.digest != recording.asked.digest):
            raise InvalidRequest("Last-Event-ID is of another request; send that one's body, or none, to its route")
        self._count("event_id")
        return Playback(recording, start=start, is_again=True, left=self._tidy)

    def _repeat(self, recording: Recording, asked: Asked) -> Playback:
        if asked != recording.asked:
            raise KeyReused("the Idempotency-Key belongs to another request; use a new one")
        if not recording.has(0):
            raise AnswerGone("the answer is too long to be sent again from its beginning; use a new Idempotency-Key")
        self._count("key")
        return Playback(recording, start=0, is_again=True, left=self._tidy)

    def _tidy(self, recording: Recording) -> None:
        """It, or a connection to it, has ended. An error is not kept: the retry that follows is to be a new attempt."""
        if recording.has_failed and not recording.num_readers:
            self._drop(recording)

    def _drop(self, recording: Recording) -> None:
        recording.abandon()
        self._by_id.pop(recording.id, None)
        if recording.key and self._by_key.get((recording.owner, recording.key)) is recording:
            del self._by_key[recording.owner, recording.key]
