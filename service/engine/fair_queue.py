"""Who waits, and whose turn it is: among owners the one that was served least, among its sequences the first by rank.

Served are tokens: each that is computed for an owner, prompt or completion, is counted for it. An owner that comes to
the queue counts as served no less than the least served of those that wait there already, so that nobody saves up
service while it asks for none. (Virtual token counters: Sheng et al. 2024, "Fairness in Serving Large Language Models",
OSDI, arXiv 2401.00588.) So the tokens of two owners who both keep waiting differ by what a batch of sequences comes to,
and no more, however many of them one sends. A priority moves a sequence among its owner's, and no further.

Nothing is remembered when nobody waits: what everybody gets at once need not be shared.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from service.engine.sequence import Sequence, by_rank

# Owners that are remembered while others wait.
_MAX_OWNERS = 4096


class FairQueue:
    """The waiting sequences. Deterministic: a function of what was added, removed and charged, in that order."""

    def __init__(self) -> None:
        self._lines: dict[str, list[Sequence]] = {}  # by rank
        self._num_served: dict[str, int] = {}  # tokens, of every owner that waits and some that do not
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, owner by owner."""
        for line in self._lines.values():
            yield from line

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        owner = sequence.owner
        if owner not in self._lines:
            self._join(owner)
        insort(self._lines[owner], sequence, key=by_rank)
        self._length += 1

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer. It must be here."""
        line = self._lines[sequence.owner]
        place = bisect_left(line, sequence.rank, key=by_rank)
        assert line[place] is sequence
        del line[place]
        self._length -= 1
        if not line:
            del self._lines[sequence.owner]

    def first(self) -> Sequence:
        """Whose turn it is. There must be somebody."""
        served, lines = self._num_served, self._lines
        owner = min(lines, key=lambda name: (served[name], lines[name][0].rank))
        return lines[owner][0]

    def expired(self, now: float) -> list[Sequence]:
        """Those whose deadline passed before they began."""
        late = (s for s in self if s.deadline_seconds is not None and s.deadline_seconds < now)
        return [sequence for sequence in late if sequence.first_scheduled_seconds is None]

    def charge(self, owner: str, num_tokens: int) -> None:
        """So many tokens are computed for this owner."""
        if owner in self._num_served:
            self._num_served[owner] += num_tokens

    def check_integrity(self) -> None:
        """Everybody stands in the line of its owner, by rank, and nobody's line is empty.

        Raises:
            AssertionError: a bug of ours.
        """
        assert self._length == sum(map(len, self._lines.values()))
        assert self._lines.keys() <= self._num_served.keys()
        for owner, line in self._lines.items():
            assert line, f"{owner} has an empty line"
            assert all(sequence.owner == owner for sequence in line)
            assert line == sorted(line, key=by_rank), "sequences do not stand by rank"

    def _join(self, owner: str) -> None:
        """An owner that did not wait begins to."""
        if not self._lines:
            self._num_served.clear()
        elif len(self._num_served) >= _MAX_OWNERS:
            self._num_served = {name: self._num_served[name] for name in self._lines}
        least = min((self._num_served[name] for name in self._lines), default=0)
        self._num_served[owner] = max(least, self._num_served.get(owner, 0))
        self._lines[owner] = []
