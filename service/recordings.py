"""Answers that outlive a connection: who lost it comes back for the rest, or asks again and gets the same answer.

A request with an `Idempotency-Key`, or of a client that reads nothing but event streams, is answered beside its
connection. What is sent is kept, and every connection that asks for it reads from there: the first, the one after it
that says which event it saw last (`Last-Event-ID`, the WHATWG's EventSource), and the retry under the same key (the
IETF's draft-ietf-httpapi-idempotency-key-header), which does not generate twice.

Other requests end with their connection. Their events have no ids, which some clients take for a part of the data.
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

# Of all answers. Beyond that none is kept that is finished and not being read.
MAX_KEPT_BYTES: Final = 64 * 2**20
_OVERHEAD_BYTES: Final = 4096  # of an answer of no text
_EVENT_ID: Final = re.compile(r"([0-9a-f]{32})/(\d{1,9})")
_KEY: Final = re.compile(r"[!-~]{1,255}")


class Recordings:
    """The recordings of this API process, by id and by key.

    Args:
        keep_seconds: how long an answer waits for somebody to come back, unfinished or finished.
        count: told of each connection that reads an answer begun for an earlier one: "event_id" or "key".
        waste: told how many tokens of an answer nobody came for.
    """

    def __init__(self, *, keep_seconds: float, count: Callable[[str], None], waste: Callable[[int], None]) -> None:
        self._keep_seconds = keep_seconds
        self._count = count
        self._waste = waste
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
        recording = Recording(make, owner=owner, key=key, asked=asked, ended=self._tidy, waste=self._waste)
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
