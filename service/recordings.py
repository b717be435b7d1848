"""Resumable streams and idempotent retries: response buffers that outlive a connection.

A response is buffered if its request has an `Idempotency-Key`, or accepts only `text/event-stream`. Generation then
does not depend on the connection. Every connection of that request reads from the buffer:

- the first connection
- a reconnect with `Last-Event-ID` (WHATWG EventSource), which gets the events after that id
- a retry under the same `Idempotency-Key` (draft-ietf-httpapi-idempotency-key-header), which does not generate twice

Any other request ends with its connection. Its events have no ids, because some clients take ids for data.
"""

import hashlib
import re
import time
from collections.abc import Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from service.access import KEY_NAME
from service.errors import AnswerGone, InvalidRequest, KeyReused
from service.queue_terms import TIMEOUT_HEADER
from service.recording import Asked, Make, Playback, Recording

# Limit of all buffers together. Over the limit, finished buffers without readers are dropped, oldest first.
MAX_KEPT_BYTES: Final = 64 * 2**20
_OVERHEAD_BYTES: Final = 4096  # of a buffer without text
_EVENT_ID: Final = re.compile(r"([0-9a-f]{32})/(\d{1,9})")
_KEY: Final = re.compile(r"[!-~]{1,255}")


class Recordings:
    """Response buffers of this API process, by id and by key.

    Args:
        keep_seconds: how long a buffer without readers is kept, finished or not; 0 turns buffering off.
        count: called with "event_id" or "key" for each connection that reads a buffer started by an earlier request.
        waste: called with the number of tokens of a response that were sent to no client.
    """

    def __init__(self, *, keep_seconds: float, count: Callable[[str], None], waste: Callable[[int], None]) -> None:
        self._keep_seconds = keep_seconds
        self._count = count
        self._waste = waste
        self._by_id: dict[str, Recording] = {}  # in order of creation
        self._by_key: dict[tuple[str, str], Recording] = {}

    async def answer(self, request: Request, body: bytes, make: Make) -> Response:
        """Return the response to a request: the result of `make`, or a buffered response.

        Raises:
            InvalidRequest: a header is malformed, or names the response to a different request.
            KeyReused: the key belongs to a different request.
            AnswerGone: the buffered response is no longer there, or its needed beginning was dropped.
        """
        key = request.headers.get("idempotency-key")
        owner = str(getattr(request.state, KEY_NAME, ""))
        digest = hashlib.blake2b(body, digest_size=16).digest()
        asked = Asked(request.url.path, digest, request.headers.get(TIMEOUT_HEADER))
        if event_id := request.headers.get("last-event-id", ""):
            return self._resume(event_id, owner, asked, has_body=bool(body))
        if key is not None and not _KEY.fullmatch(key):
            raise InvalidRequest("Idempotency-Key must be 1 to 255 visible ASCII characters")
        # A client that also accepts JSON may not understand event ids, and may not have asked for a stream.
        is_event_source = request.headers.get("accept", "").strip().lower() == "text/event-stream"
        if not (key or is_event_source) or not self._keep_seconds:
            return await make()
        if key and (recording := self._by_key.get((owner, key))) is not None:
            return self._repeat(recording, asked)
        recording = Recording(make, owner=owner, key=key, asked=asked, ended=self._tidy, waste=self._waste)
        self._by_id[recording.id] = recording
        if key:
            self._by_key[owner, key] = recording
        return Playback(recording, start=0, is_again=False, left=self._tidy)

    def tend(self) -> None:
        """Drop the buffers that have expired or exceed the memory limit. Call about once a second."""
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
        """Cancel all responses, because the process ends."""
        for recording in self._by_id.values():
            recording.cancel()

    def _resume(self, event_id: str, owner: str, asked: Asked, *, has_body: bool) -> Playback:
        match = _EVENT_ID.fullmatch(event_id)
        if match is None:
            raise InvalidRequest(
                "Last-Event-ID is not an event id of this server; send the id of the last event received"
            )
        recording, start = self._by_id.get(match[1]), int(match[2]) + 1
        if recording is None or recording.owner != owner or not recording.has(start):
            raise AnswerGone(
                "the events after Last-Event-ID are no longer stored; repeat the request without Last-Event-ID"
            )
        if asked.path != recording.asked.path or (has_body and asked.digest != recording.asked.digest):
            raise InvalidRequest(
                "Last-Event-ID belongs to another request; use the route of that request, with its body or none"
            )
        self._count("event_id")
        return Playback(recording, start=start, is_again=True, left=self._tidy)

    def _repeat(self, recording: Recording, asked: Asked) -> Playback:
        if asked != recording.asked:
            raise KeyReused("the Idempotency-Key belongs to another request; use a new one")
        if not recording.has(0):
            raise AnswerGone("the beginning of the response is no longer stored; use a new Idempotency-Key")
        self._count("key")
        return Playback(recording, start=0, is_again=True, left=self._tidy)

    def _tidy(self, recording: Recording) -> None:
        """Drop a failed response once it has no readers, so that a retry is a new attempt."""
        if recording.has_failed and not recording.num_readers:
            self._drop(recording)

    def _drop(self, recording: Recording) -> None:
        recording.abandon()
        self._by_id.pop(recording.id, None)
        if recording.key and self._by_key.get((recording.owner, recording.key)) is recording:
            del self._by_key[recording.owner, recording.key]
