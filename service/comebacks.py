"""What refused clients were told, how many of them come back, and whether it was right.

Those who come back stand in a line that nobody holds a connection for: each is told a time behind those that were told
before it and are still expected. How many will come is learnt from how many came.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

# Refusals over which the share of those that come back is averaged.
_MEMORY = 100
# Promises that are watched at a time; more say no more about their accuracy.
_MAX_WATCHED = 16
# Owners that are remembered when nobody of theirs is expected.
_MAX_OWNERS = 1000
# A promise so far off is given up, and counted as that far off.
_LONGEST_ERROR_SECONDS = 120.0

Asked = TypeVar("Asked")


@dataclass(slots=True)
class _Line:
    """Of one owner: when its refused sequences are expected, and how many refusals and returns there were of late."""

    due_seconds: list[float] = field(default_factory=list)  # ascending
    num_refused: float = 2.0  # so that half of them are expected before anything is known
    num_returned: float = 1.0

    @property
    def share(self) -> float:
        return min(1.0, self.num_returned / self.num_refused)


@dataclass(frozen=True, slots=True)
class _Promise(Generic[Asked]):
    owner: str
    asked: Asked
    told_at: float
    seconds: float


class Comebacks(Generic[Asked]):
    """The lines of all owners, and a sample of promises that are watched.

    Args:
        observe_error: told how much later than promised room appeared, in seconds; less than 0 where it was earlier.
    """

    def __init__(self, observe_error: Callable[[float], None]) -> None:
        self._observe_error = observe_error
        self._lines: dict[str, _Line] = {}
        self._watched: deque[_Promise[Asked]] = deque()

    def num_expected(self, owner: str, now: float, *, before: float | None = None) -> float:
        """Sequences of this owner that were refused and will come back, `before` some time where one is given."""
        line = self._lines.get(owner)
        if line is None:
            return 0.0
        del line.due_seconds[: bisect_left(line.due_seconds, now)]
        count = len(line.due_seconds) if before is None else bisect_left(line.due_seconds, before)
        return line.share * count

    def refused(self, owner: str, asked: Asked, *, num_sequences: int, now: float, seconds: float) -> None:
        """Somebody was told to come back after so many seconds."""
        line = self._lines.setdefault(owner, _Line())
        line.num_refused = line.num_refused * (1 - 1 / _MEMORY) + 1.0
        line.num_returned *= 1 - 1 / _MEMORY
        for _ in range(num_sequences):
            insort(line.due_seconds, now + seconds)
        if len(self._watched) < _MAX_WATCHED:
            self._watched.append(_Promise(owner, asked, now, seconds))
        if len(self._lines) > _MAX_OWNERS:
            self._lines = {name: line for name, line in self._lines.items() if line.due_seconds}

    def returned(self, owner: str) -> None:
        """Somebody has come back."""
        if (line := self._lines.get(owner)) is not None:
            line.num_returned += 1.0

    def watch(self, now: float, has_room: Callable[[Asked, float], bool]) -> None:
        """Something has begun or ended: see whose room is there now.

        Args:
            has_room: whether what was asked could be admitted, beside so many sequences that come before it.
        """
        for _ in range(len(self._watched)):
            promise = self._watched.popleft()
            waited = now - promise.told_at
            num_before = self.num_expected(promise.owner, now, before=promise.told_at + promise.seconds)
            if has_room(promise.asked, num_before) or waited - promise.seconds >= _LONGEST_ERROR_SECONDS:
                self._observe_error(waited - promise.seconds)
            else:
                self._watched.append(promise)
