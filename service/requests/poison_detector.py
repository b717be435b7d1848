"""Detection of poison requests, which crash the worker. A request here is one sequence or one attention query.

A request that was running at a crash, without progress since its start, gets a strike. Any progress removes the
strikes. A request with two strikes (a suspect) is tried alone: the worker gets no other work meanwhile. A crash during
the trial identifies the request as poison.
"""

from collections.abc import Iterable

_STRIKES_BEFORE_TRIAL = 2


class PoisonRequestDetector:
    """Detector of requests that crash the worker. It counts crashes (strikes) of unfinished requests by uid.

    While it tries a suspect alone, it holds all other requests back from the worker.
    """

    def __init__(self) -> None:
        self._running: dict[str, None] = {}  # in order of start; no progress since
        self._strikes: dict[str, int] = {}
        self._suspects: dict[str, None] = {}  # suspects that wait for their trial
        self._on_trial: str | None = None
        self._held: dict[str, None] = {}  # in order of arrival

    @property
    def is_empty(self) -> bool:
        """True if no request is running, has strikes or is held back."""
        return not (self._running or self._strikes or self._held)

    def release(self, uids: Iterable[str] = ()) -> list[str]:
        """Add `uids` to the held requests. Remove and return those that the worker may get now.

        During a trial, these are none. Otherwise they are one suspect, whose trial begins; without suspects, all.
        """
        self._held.update(dict.fromkeys(uids))
        if self._on_trial is not None:
            return []
        if self._suspects:
            self._on_trial = next(iter(self._suspects))
            del self._suspects[self._on_trial], self._held[self._on_trial]
            return [self._on_trial]
        released = list(self._held)
        self._held.clear()
        return released

    def record_start(self, uid: str) -> None:
        self._running[uid] = None

    def is_running(self, uid: str) -> bool:
        """Return True if the worker has started to compute a request and has reported no progress since."""
        return uid in self._running

    def record_progress(self, uid: str) -> bool:
        """Remove the strikes of a request that made progress. Return True if that ends a trial and a suspect waits.

        After True, the caller must cancel the request at the worker, because the next suspect must run alone.
        """
        self._running.pop(uid, None)
        self._strikes.pop(uid, None)
        if uid != self._on_trial:
            return False
        self._on_trial = None
        return bool(self._suspects)

    def forget(self, uid: str) -> None:
        self.record_progress(uid)
        self._suspects.pop(uid, None)
        self._held.pop(uid, None)

    def record_crash(self) -> str | None:
        """Give a strike to each request that was running at a crash; return the poison request, or None if unknown."""
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
