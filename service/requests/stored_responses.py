"""Stored responses of `/v1/responses`, in the memory of the API process: read again by id, and continued."""

import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import msgspec

from service.protocol.errors import ApiError, InvalidRequest, ResponseNotFound, ResponseStoreFull
from service.requests.response_store import BufferedResponse

_OVERHEAD_BYTES: Final = 4096  # of a response without text
_RETRY_SECONDS: Final = 10.0


class Snapshot(Protocol):
    """Function that returns the JSON of a response so far: queued or running, failed with `error`, or cancelled."""

    def __call__(self, *, error: ApiError | None = None, is_cancelled: bool = False) -> bytes: ...


class StoredResponse:
    """One response, from its generation until it is deleted, expires or makes room for others.

    Args:
        tenant: name of the API key.
        items: input items with ids, as JSON objects; those of earlier responses come first.
        keep: called with the response when it ends.
    """

    def __init__(self, tenant: str, items: list[dict[str, Any]], keep: Callable[["StoredResponse"], object]) -> None:
        self.id = ""
        self.tenant = tenant
        self.items = msgspec.json.encode(items)
        self.events: BufferedResponse | None = None  # of a background response, which goes on without a client
        self.num_counted_bytes = 0
        self.ended_seconds = 0.0
        self.is_deleted = False
        self._keep = keep
        self._body = b""
        self._snapshot: Snapshot | None = None

    @property
    def is_finished(self) -> bool:
        return bool(self._body)

    @property
    def num_bytes(self) -> int:
        events = 0 if self.events is None else self.events.num_bytes
        return len(self.items) + len(self._body) + events + _OVERHEAD_BYTES

    @property
    def body(self) -> bytes:
        """JSON of the response so far; empty before `begin`."""
        return self._body if self._snapshot is None else self._snapshot()

    def begin(self, response_id: str, snapshot: Snapshot) -> None:
        """Set the response's id, and the function that returns its JSON until it ends."""
        self.id, self._snapshot = response_id, snapshot

    def end(self, body: bytes) -> None:
        """Store the JSON of the ended response. A second call, as for a cancelled response, changes nothing."""
        if not self._body:
            self._body, self._snapshot, self.ended_seconds = body, None, time.monotonic()
            self._keep(self)

    def fail(self, error: Exception) -> None:
        """Store the response as failed, unless it has ended or `begin` was not called. Nothing is sent to clients."""
        if self._snapshot is not None:
            self.end(self._snapshot(error=error if isinstance(error, ApiError) else ApiError("internal error")))

    def cancel(self) -> None:
        """End the response as cancelled, unless it has ended, and stop the generation of a background response."""
        if self.events is not None:
            self.events.abandon()
        if self._snapshot is not None:
            self.end(self._snapshot(is_cancelled=True))

    def conversation(self) -> list[dict[str, Any]]:
        """Return the input items, then the output items, of an ended response."""
        output: list[dict[str, Any]] = msgspec.json.decode(self._body)["output"]
        return [*msgspec.json.decode(self.items), *output]


class StoredResponses:
    """Store of responses by id, limited in bytes and time. The oldest ended responses make room for new ones.

    Args:
        max_bytes: maximum bytes of all responses together.
        keep_seconds: how long an ended response is kept; 0 turns the store off.
    """

    def __init__(self, *, max_bytes: int, keep_seconds: float) -> None:
        self._max_bytes = max_bytes
        self._keep_seconds = keep_seconds
        self._running: dict[str, StoredResponse] = {}
        self._ended: dict[str, StoredResponse] = {}  # in the order of their ends
        self._num_ended_bytes = 0

    @property
    def is_on(self) -> bool:
        return self._keep_seconds > 0

    def check_room(self, record: StoredResponse) -> None:
        """Raise an `ApiError` if a new response would not fit even after all ended responses were discarded."""
        needed, running = record.num_bytes, sum(each.num_bytes for each in self._running.values())
        if needed > self._max_bytes:
            raise InvalidRequest(
                f"the input needs {needed} bytes in the response store, over its limit of {self._max_bytes}; "
                "shorten the input, or send store: false without background",
                param="store",
            )
        if needed + running > self._max_bytes:
            raise ResponseStoreFull(
                "the response store is full of running background responses; try again later, or send store: false "
                "without background",
                retry_after_seconds=_RETRY_SECONDS,
            )

    def add(self, record: StoredResponse) -> None:
        """Add a running background response, or a response that has ended, unless it was deleted.

        An ended response displaces the oldest ended ones while all responses together exceed the limit of bytes.
        """
        if record.is_deleted:
            return
        if not record.is_finished:
            self._running[record.id] = record
            return
        self._running.pop(record.id, None)
        self._ended[record.id] = record
        record.num_counted_bytes = record.num_bytes
        self._num_ended_bytes += record.num_counted_bytes
        self._discard_excess()

    def get(self, response_id: str, tenant: str, *, param: str | None = None) -> StoredResponse:
        """Return a response of a tenant. Raises ResponseNotFound, for the responses of other tenants too."""
        record = self._running.get(response_id) or self._ended.get(response_id)
        if record is None or record.tenant != tenant:
            raise ResponseNotFound(
                f"the response {response_id[:100]!r} is not stored: it never was, was deleted, has expired or made "
                "room for others, or the server has restarted; send the whole conversation as input",
                param=param,
            )
        return record

    def delete(self, record: StoredResponse) -> None:
        """Discard a response. A running one is cancelled."""
        record.is_deleted = True
        record.cancel()
        self._running.pop(record.id, None)
        if self._ended.pop(record.id, None) is not None:
            self._num_ended_bytes -= record.num_counted_bytes

    def discard_expired(self) -> None:
        """Discard the responses that have expired or exceed the limit. Call this method once a second."""
        since = time.monotonic() - self._keep_seconds
        for record in self._oldest():
            if record.ended_seconds > since:
                break
            self.delete(record)
        self._discard_excess()

    def close(self) -> None:
        """Cancel the generation of all background responses, because the API process ends."""
        for record in self._running.values():
            if record.events is not None:
                record.events.cancel()

    def _discard_excess(self) -> None:
        running = sum(each.num_bytes for each in self._running.values())
        for record in self._oldest():
            if self._num_ended_bytes + running <= self._max_bytes:
                break
            self.delete(record)

    def _oldest(self) -> Iterator[StoredResponse]:
        """Yield the ended responses, oldest first. The caller deletes each; if it keeps one, the iteration ends."""
        while self._ended:
            record = next(iter(self._ended.values()))
            yield record
            if record.id in self._ended:
                break
