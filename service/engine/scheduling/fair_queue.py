"""Fair queue of waiting sequences: the tenant with the fewest served tokens comes first.

A tenant is an API key, or a client address without keys. A counter holds the tokens computed for each tenant that has
waiting sequences. A tenant that joins the queue starts at no less than the lowest counter of the waiting tenants, so
that idle time earns no credit. (Virtual token counters: Sheng et al. 2024, "Fairness in Serving Large Language Models",
OSDI, arXiv 2401.00588.) While two tenants both have waiting sequences, their counters differ by at most about the
tokens of the running sequences, even if one tenant sends far more requests. The sequences of one tenant are sorted by
rank.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator

from service.engine.scheduling.sequence import SequenceState, by_rank

# Maximum number of tenants with a counter. Beyond it, counters of tenants that do not wait are dropped.
_MAX_TENANTS = 4096


class FairQueue:
    """Fair queue of waiting sequences; their order depends only on the calls of `add`, `remove` and `charge`."""

    def __init__(self) -> None:
        self._queues: dict[str, list[SequenceState]] = {}  # by tenant, each sorted by rank
        self._num_served: dict[str, int] = {}  # tokens by tenant: all waiting tenants, and some others
        self._length = 0
        self._due_seconds = math.inf  # no deadline of a waiting sequence that has never run is earlier

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[SequenceState]:
        for queue in self._queues.values():
            yield from queue

    def add(self, sequence: SequenceState) -> None:
        tenant = sequence.tenant
        if tenant not in self._queues:
            self._join(tenant)
        insort(self._queues[tenant], sequence, key=by_rank)
        self._length += 1
        if sequence.deadline_seconds is not None and sequence.first_scheduled_seconds is None:
            self._due_seconds = min(self._due_seconds, sequence.deadline_seconds)

    def remove(self, tenant: str, rank: tuple[float, int]) -> None:
        queue = self._queues[tenant]
        index = bisect_left(queue, rank, key=by_rank)
        assert queue[index].rank == rank
        del queue[index]
        self._length -= 1
        if not queue:
            del self._queues[tenant]

    def first(self) -> SequenceState:
        """Return the waiting sequence to admit next, and leave it in the queue. The queue must not be empty."""
        served, queues = self._num_served, self._queues
        tenant = min(queues, key=lambda name: (served[name], queues[name][0].rank))
        return queues[tenant][0]

    def expired(self, now: float) -> list[SequenceState]:
        """Return the waiting sequences that have never run and whose deadline has passed.

        Sequences are looked at only once a deadline has passed, because the scheduler asks before every step.
        """
        if now <= self._due_seconds:
            return []
        timed = [(s.deadline_seconds, s) for s in self if s.first_scheduled_seconds is None]
        due = [(seconds, sequence) for seconds, sequence in timed if seconds is not None]
        self._due_seconds = min((seconds for seconds, _ in due if seconds >= now), default=math.inf)
        return [sequence for seconds, sequence in due if seconds < now]

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Add computed tokens to a tenant's counter of served tokens. A tenant without a counter is ignored."""
        if tenant in self._num_served:
            self._num_served[tenant] += num_tokens

    def check_integrity(self) -> None:
        """Assert that each waiting sequence is in its tenant's queue, sorted by rank; no queue may be empty."""
        assert self._length == sum(map(len, self._queues.values()))
        assert self._queues.keys() <= self._num_served.keys()
        for tenant, queue in self._queues.items():
            assert queue, f"{tenant} has an empty queue"
            assert all(sequence.tenant == tenant for sequence in queue)
            assert queue == sorted(queue, key=by_rank), "waiting sequences are not sorted by rank"

    def _join(self, tenant: str) -> None:
        if not self._queues:
            self._num_served.clear()
        elif len(self._num_served) >= _MAX_TENANTS:
            self._num_served = {name: self._num_served[name] for name in self._queues}
        least = min((self._num_served[name] for name in self._queues), default=0)
        self._num_served[tenant] = max(least, self._num_served.get(tenant, 0))
        self._queues[tenant] = []
