"""Find the poison request: the one that kills workers.

Every kind of request counts alike: completions, conversations, embeddings, attention looks. A request here is one
sequence or one look, named by its uid.

A request that was running at a crash, and had made no progress since the worker began it, gets a strike. Any progress
removes its strikes. A request with two strikes is tried alone: while it runs, nothing else is given to the worker. A
third strike, alone, has one explanation and convicts it.
"""

from collections.abc import Sequence
from typing import TypeAlias

from service.messages import Look, Submit

# With so many strikes a request is retried alone.
_STRIKES_BEFORE_TRIAL = 2

Work: TypeAlias = Submit | Look


class PoisonRequestDetector:
    """The strikes against unfinished requests, and the work that is held back during a trial."""

    def __init__(self) -> None:
        self._running: dict[str, None] = {}  # in order of their start, without progress since
        self._strikes: dict[str, int] = {}
        self._suspects: dict[str, None] = {}  # still to be tried
        self._on_trial: str | None = None
        self._held: dict[str, Work] = {}  # in order of arrival

    @property
    def is_empty(self) -> bool:
        """Whether progress would change nothing: the usual state between two starts."""
        return not (self._running or self._strikes or self._held)

    def admit(self, work: Sequence[Work]) -> list[Work]:
        """Return the work that may be given to the worker now. During a trial it is held until `release`."""
        if not self._suspects and self._on_trial is None:
            return list(work)
        self._held.update((each.uid, each) for each in work)
        return []

    def release(self) -> list[Work]:
        """Return held work that may be given to the worker now: the next suspect alone; after the last trial, all."""
        if self._on_trial is not None:
            return []
        if self._suspects:
            self._on_trial = next(iter(self._suspects))
            del self._suspects[self._on_trial]
            return [self._held.pop(self._on_trial)]
        released = list(self._held.values())
        self._held.clear()
        return released

    def record_start(self, uid: str) -> None:
        """The worker is about to compute this request."""
        self._running[uid] = None

    def record_progress(self, uid: str) -> bool:
        """Remove the strikes of a request that made progress.

        Returns: whether it must leave the worker, because the next suspect is to be tried alone.
        """
        self._running.pop(uid, None)
        self._strikes.pop(uid, None)
        if uid != self._on_trial:
            return False
        self._on_trial = None
        return bool(self._suspects)

    def forget(self, uid: str) -> None:
        """Drop a request that has ended."""
        self.record_progress(uid)
        self._suspects.pop(uid, None)
        self._held.pop(uid, None)

    def record_crash(self) -> str | None:
        """Give a strike to each running request. All unfinished work is to be admitted again after this.

        Returns: the poison request, once it is known.
        """
        for uid in self._running:
            self._strikes[uid] = self._strikes.get(uid, 0) + 1
        poison = self._on_trial if list(self._running) == [self._on_trial] else None
        if poison is not None:
            del self._strikes[poison]
        self._running.clear()
        self._held.clear()
        self._on_trial = None
        self._suspects = {uid: None for uid, number in self._strikes.items() if number >= _STRIKES_BEFORE_TRIAL}
        return poison
