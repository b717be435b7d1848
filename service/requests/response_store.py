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

from service.http.middleware import KEY_NAME
from service.http.request_io import TIMEOUT_HEADER
from service.protocol.errors import IdempotencyKeyReused, InvalidRequest, ResponseGone
from service.requests.response_buffer import Asked, BufferedResponse, BufferedResponseReplay, Make

# Limit of all buffers together. Over the limit, finished buffers without readers are dropped, oldest first.
MAX_KEPT_BYTES: Final = 64 * 2**20
_OVERHEAD_BYTES: Final = 4096  # of a buffer without text
_EVENT_ID: Final = re.compile(r"([0-9a-f]{32})/(\d{1,9})")
_KEY: Final = re.compile(r"[!-~]{1,255}")


class ResponseStore:
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
        self._by_id: dict[str, BufferedResponse] = {}  # in order of creation
        self._by_key: dict[tuple[str, str], BufferedResponse] = {}

    async def answer(self, request: Request, body: bytes, make: Make) -> Response:
        """Return the response to a request: the result of `make`, or a buffered response.

        Raises:
            InvalidRequest: a header is malformed, or names the response to a different request.
            IdempotencyKeyReused: the key belongs to a different request.
            ResponseGone: the buffered response is no longer there, or its needed beginning was dropped.
        """
        key = request.headers.get("idempotency-key")
        tenant = str(getattr(request.state, KEY_NAME, ""))
        digest = hashlib.blake2b(body, digest_size=16).digest()
        asked = Asked(request.url.path, digest, request.headers.get(TIMEOUT_HEADER))
        if event_id := request.headers.get("last-event-id", ""):
            return self._resume(event_id, tenant, asked, has_body=bool(body))
        if key is not None and not _KEY.fullmatch(key):
            raise InvalidRequest("Idempotency-Key must be 1 to 255 visible ASCII characters")
        # A client that also accepts JSON may not understand event ids, and may not have asked for a stream.
        is_event_source = request.headers.get("accept", "").strip().lower() == "text/event-stream"
        if not (key or is_event_source) or not self._keep_seconds:
            return await make()
        if key and (buffered := self._by_key.get((tenant, key))) is not None:
            return self._repeat(buffered, asked)
        buffered = BufferedResponse(make, tenant=tenant, key=key, asked=asked, ended=self._tidy, waste=self._waste)
        self._by_id[buffered.id] = buffered
        if key:
            self._by_key[tenant, key] = buffered
        return BufferedResponseReplay(buffered, start=0, is_again=False, left=self._tidy)

    def tend(self) -> None:
        """Drop the buffers that have expired or exceed the memory limit. Call about once a second."""
        since = time.monotonic() - self._keep_seconds
        for buffered in list(self._by_id.values()):
            if not buffered.num_readers and buffered.idle_since_seconds <= since:
                self._drop(buffered)
        excess = sum(each.num_bytes + _OVERHEAD_BYTES for each in self._by_id.values()) - MAX_KEPT_BYTES
        for buffered in [each for each in self._by_id.values() if each.is_finished and not each.num_readers]:
            if excess <= 0:
                break
            excess -= buffered.num_bytes + _OVERHEAD_BYTES
            self._drop(buffered)

    def close(self) -> None:
        """Cancel all responses, because the process ends."""
        for buffered in self._by_id.values():
            buffered.cancel()

    def _resume(self, event_id: str, tenant: str, asked: Asked, *, has_body: bool) -> BufferedResponseReplay:
        match = _EVENT_ID.fullmatch(event_id)
        if match is None:
            raise InvalidRequest(
                "Last-Event-ID is not an event id of this server; send the id of the last event received"
            )
        buffered, start = self._by_id.get(match[1]), int(match[2]) + 1
        if buffered is None or buffered.tenant != tenant or not buffered.has(start):
            raise ResponseGone(
                "the events after Last-Event-ID are no longer stored; repeat the request without Last-Event-ID"
            )
        if asked.path != buffered.asked.path or (has_body and asked.digest != buffered.asked.digest):
            raise InvalidRequest(
                "Last-Event-ID belongs to another request; use the route of that request, with its body or none"
            )
        self._count("event_id")
        return BufferedResponseReplay(buffered, start=start, is_again=True, left=self._tidy)

    def _repeat(self, buffered: BufferedResponse, asked: Asked) -> BufferedResponseReplay:
        if asked != buffered.asked:
            raise IdempotencyKeyReused("the Idempotency-Key belongs to another request; use a new one")
        if not buffered.has(0):
            raise ResponseGone("the beginning of the response is no longer stored; use a new Idempotency-Key")
        self._count("key")
        return BufferedResponseReplay(buffered, start=0, is_again=True, left=self._tidy)

    def _tidy(self, buffered: BufferedResponse) -> None:
        """Drop a failed response once it has no readers, so that a retry is a new attempt."""
        if buffered.has_failed and not buffered.num_readers:
            self._drop(buffered)

    def _drop(self, buffered: BufferedResponse) -> None:
        buffered.abandon()
        self._by_id.pop(buffered.id, None)
        if buffered.key and self._by_key.get((buffered.tenant, buffered.key)) is buffered:
            del self._by_key[buffered.tenant, buffered.key]
