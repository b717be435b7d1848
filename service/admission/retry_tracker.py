"""Virtual queue of rejected clients: expected retries, and the accuracy of Retry-After.

A rejected client gets a Retry-After behind the clients of its tenant that were rejected earlier and are still expected.
No connection is held meanwhile. The share of clients that retry is learned from recent rejections.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

# Rejections over which the share of clients that retry is averaged.
_MEMORY = 100
# Retry-After values that are checked at a time, a sample that suffices to measure their accuracy.
_MAX_WATCHED = 16
# Tenants to remember. Above this number, tenants with no expected retry are forgotten.
_MAX_OWNERS = 1000
# A Retry-After that is this late is no longer checked, and the lateness so far is recorded as its error.
_MAX_ERROR_SECONDS = 120.0

Asked = TypeVar("Asked")


@dataclass(slots=True)
class _TenantQueue:
    """Virtual queue of one tenant: times of expected retries, and decaying counts of rejections and retries."""

    due_seconds: list[float] = field(default_factory=list)  # one entry per rejected sequence, ascending
    num_rejected: float = 2.0  # prior: half of the rejected clients retry
    num_returned: float = 1.0

    @property
    def share(self) -> float:
        return min(1.0, self.num_returned / self.num_rejected)


@dataclass(frozen=True, slots=True)
class _Promise(Generic[Asked]):
    """A Retry-After that was sent, and what it was sent for."""

    tenant: str
    asked: Asked
    sent_at: float
    seconds: float


class RetryTracker(Generic[Asked]):
    """Virtual queues of all tenants, and a sample of Retry-After values to check.

    Args:
        observe_error: receives how much later than its Retry-After a request would have fit, in seconds; negative if
            earlier.
    """

    def __init__(self, observe_error: Callable[[float], None]) -> None:
        self._observe_error = observe_error
        self._lines: dict[str, _TenantQueue] = {}
        self._watched: deque[_Promise[Asked]] = deque()

    def num_expected(self, tenant: str, now: float, *, before: float | None = None) -> float:
        """Return the expected number of rejected sequences of a tenant that will be retried.

        Args:
            before: count only retries that are due before this time.
        """
        line = self._lines.get(tenant)
        if line is None:
            return 0.0
        del line.due_seconds[: bisect_left(line.due_seconds, now)]
        count = len(line.due_seconds) if before is None else bisect_left(line.due_seconds, before)
        return line.share * count

    def refused(self, tenant: str, asked: Asked, *, num_sequences: int, now: float, seconds: float) -> None:
        """Record a rejection with a Retry-After of `seconds`."""
        line = self._lines.setdefault(tenant, _TenantQueue())
        line.num_rejected = line.num_rejected * (1 - 1 / _MEMORY) + 1.0
        line.num_returned *= 1 - 1 / _MEMORY
        for _ in range(num_sequences):
            insort(line.due_seconds, now + seconds)
        if len(self._watched) < _MAX_WATCHED:
            self._watched.append(_Promise(tenant, asked, now, seconds))
        if len(self._lines) > _MAX_OWNERS:
            self._lines = {name: line for name, line in self._lines.items() if line.due_seconds}

    def returned(self, tenant: str) -> None:
        """Record a retry of a rejected request."""
        if (line := self._lines.get(tenant)) is not None:
            line.num_returned += 1.0

    def watch(self, now: float, has_room: Callable[[Asked, float], bool]) -> None:
        """Check the sampled Retry-After values. Call it after a sequence has begun or ended.

        Args:
            has_room: returns whether a request would be admitted behind a number of expected sequences.
        """
        for _ in range(len(self._watched)):
            promise = self._watched.popleft()
            waited = now - promise.sent_at
            num_before = self.num_expected(promise.tenant, now, before=promise.sent_at + promise.seconds)
            if has_room(promise.asked, num_before) or waited - promise.seconds >= _MAX_ERROR_SECONDS:
                self._observe_error(waited - promise.seconds)
            else:
                self._watched.append(promise)
